"""What the processes of one computer know of each other, and of the computer: no torch, no web framework."""
