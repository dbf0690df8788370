"""How peers hand their state to those who need it: donors, downloads, snapshots."""
