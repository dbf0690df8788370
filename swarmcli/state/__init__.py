"""Donors hand snapshots of their state to newcomers, which download them."""
