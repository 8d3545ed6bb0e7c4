"""Commands that are a process of their own; cli.py imports one when it is asked for."""
