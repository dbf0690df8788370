"""The state of sharded optimizers on disks, and laid out anew over other ranks."""

from swarmcli.sharding.files.moving import ShardedOptimizer, lay_out_anew
from swarmcli.sharding.files.store import Restored, ShardedStateStore

__all__ = ["Restored", "ShardedOptimizer", "ShardedStateStore", "lay_out_anew"]
