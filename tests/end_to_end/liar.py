"""`swarm join` by a peer that trains for three epochs and then claims to be at epoch 1,000,000.

python liar.py -m swarmcli join ...
"""

from __future__ import annotations

import asyncio
import runpy
import sys
from typing import Any

from swarmcli.optim.core import OptimizerCore
from swarmcli.optim.state.lineage import LineagePosition

HONEST_EPOCHS = 3
CLAIMED = LineagePosition(1_000_000, 10**9, b"l" * 32)

step = OptimizerCore.step


async def lie(self: OptimizerCore, *args: Any, **kwargs: Any) -> bool:
    if self.global_steps < HONEST_EPOCHS:
        return await step(self, *args, **kwargs)
    await self._group.close()
    self.replica.state.position = CLAIMED
    self.directory.announce(anew=True)
    print("it lies from here on", flush=True)
    await asyncio.Event().wait()  # until it is killed
    return False


OptimizerCore.step = lie  # type: ignore[method-assign]
sys.argv = ["swarm", *sys.argv[3:]]
runpy.run_module("swarmcli", run_name="__main__")
