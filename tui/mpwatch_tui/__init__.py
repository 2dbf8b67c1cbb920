"""The terminal screens of mpwatch. Textual only: never torch, never the agent, never numpy."""
