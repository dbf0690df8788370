"""When an epoch is over, the group that ends it, how the end goes, and what is due for the states then."""
