"""ZeroRedundancyOptimizer, and the communication hooks that overlap its step with DDP's backward pass."""

from __future__ import annotations

from swarmcli.sharding.zero.hook import hook_with_zero_step, hook_with_zero_step_interleaved
from swarmcli.sharding.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer", "hook_with_zero_step", "hook_with_zero_step_interleaved"]
