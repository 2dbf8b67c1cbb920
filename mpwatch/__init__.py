"""mpwatch: supervise, observe and control mixed-precision training of an unmodified script.

This package is the observer's side and the contracts that both sides share. It never imports
torch; the in-process side is `mpwatch_agent`, the terminal screens are `mpwatch_tui`.
"""

__version__ = "0.1.0"
