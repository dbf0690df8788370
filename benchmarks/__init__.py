"""Measures this project beside others, which take turns with it on the same machine. Each module has a `main()`; see
NOTES.md."""
