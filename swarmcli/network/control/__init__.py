"""The one control connection per pair of peers."""
