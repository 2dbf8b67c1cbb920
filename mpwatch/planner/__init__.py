"""The planner: which configuration fits. Pure; no torch."""
