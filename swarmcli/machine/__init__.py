"""The processes of one computer tell each other of themselves, and look at the computer: no torch, no web framework."""
