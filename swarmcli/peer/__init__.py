"""The life of a process in a run: its home, what it lends, what it does by role, and how it leaves."""
