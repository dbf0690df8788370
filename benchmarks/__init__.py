"""Measurements beside peers, in the same run on the same machine. Each module has a `main()`; see NOTES.md."""
