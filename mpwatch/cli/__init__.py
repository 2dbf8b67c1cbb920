"""The verbs of the command line, one small module each."""
