"""Drift where the optimizer lives beside the model and the end of an epoch goes on while the trainer computes."""

from __future__ import annotations

import itertools

import pytest
import torch

from swarmcli.events import DriftMeasured, StateDownloaded
from swarmcli.optim.modes.base import Timing
from swarmcli.testing import virtual_time
from tests.optim.epoch.delayed_swarm import DelayedSwarm, DelayedTrainer
from tests.optim.optim_swarm import record, together
from tests.suites import soak


def corrupt(trainer: DelayedTrainer) -> None:
    with torch.no_grad():
        for copy in trainer.place.state_parameters:
            copy.add_(2.0)


FIRST = (3, Timing.DELAYED_AVERAGING)
OTHERS = [case for case in itertools.product((2, 3), Timing) if case != FIRST]


@pytest.mark.parametrize(("count", "timing"), [FIRST, *soak(OTHERS)])
def test_a_corrupted_copy_in_host_memory_is_repaired(count: int, timing: Timing) -> None:
    async def main() -> None:
        async with DelayedSwarm() as swarm:
            trainers = [await swarm.delayed(timing, seed=1, pace=1.0) for _ in range(count)]
            trainers.sort(key=lambda trainer: trainer.node.peer_id)
            await together(*(trainer.train(3) for trainer in trainers))
            for trainer in trainers:
                await trainer.core.state_dict()  # waits for the end of the epoch under way
            drifts = record(trainers[0].node, DriftMeasured)
            downloads = record(trainers[1].node, StateDownloaded)
            corrupt(trainers[1])
            await together(*(trainer.train(7) for trainer in trainers))
            for trainer in trainers:
                await trainer.core.state_dict()
            assert len(downloads) == 1
            assert len([event for event in drifts if event.strays]) == 1
            await together(*(trainer.train(8) for trainer in trainers))
            for trainer in trainers:
                await trainer.core.state_dict()
            assert len({trainer.core.position for trainer in trainers}) == 1
            assert len({trainer.core.replica.state.digest() for trainer in trainers}) == 1

    virtual_time.run(main(), timeout=300)
