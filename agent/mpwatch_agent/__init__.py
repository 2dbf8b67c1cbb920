"""The in-process side of mpwatch: `from mpwatch_agent import watch`."""
