"""When an epoch is over, the group that ends it, how the end goes, and when states are averaged or repaired."""
