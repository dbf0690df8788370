"""ZeroRedundancyOptimizer and what it is made of."""

from __future__ import annotations

from swarmcli.sharding.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
