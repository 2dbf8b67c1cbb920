"""Frames as they were encoded once: what was recorded must stay readable."""
