"""The state of sharded optimizers on disks, read by any number of ranks."""
