"""A peer that signs whatever it likes: what its claims can do, and what they cannot."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from swarmcli.dht import DHTNode
from swarmcli.optim.config import RefreshOptions
from swarmcli.optim.gradients.accumulator import Weighed
from swarmcli.optim.peers.progress import (
    FAR_AHEAD,
    LocalTrainingProgress,
    borne_out,
    estimate_global_progress,
)
from swarmcli.optim.state.lineage import MAX_COUNT
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import Swarm, together
from tests.suites import soak

LIES: list[dict[str, Any]] = [
    {"samples_accumulated": 10**12},
    {"samples_per_second": 9e11},
    {"epoch": 1 << 40},
    {"epoch": 1 << 40, "samples_accumulated": 10**12, "samples_per_second": 9e11},
    {"epoch": 1, "samples_accumulated": 10**12},
]


async def lie(node: DHTNode, lies: list[dict[str, Any]], every: float = 0.5, epoch: Any = lambda: 0) -> None:
    """Reports one lie after the other, for ever."""
    for change in itertools.cycle(lies):
        report = {"peer_id": bytes(node.peer_id), "epoch": epoch(), "samples_accumulated": 0, "client_mode": False}
        now = node.endpoint.clock.now()
        record = report | {"samples_per_second": 0.0, "time": now} | change
        await node.store("run_progress", record, now + 60, node.own_subkey())
        await asyncio.sleep(every)


def report(peer: int, epoch: int, samples: int, rate: float = 0.0) -> LocalTrainingProgress:
    return LocalTrainingProgress(
        peer_id=bytes([peer]) * 32,
        epoch=epoch,
        samples_accumulated=samples,
        samples_per_second=rate,
        time=1000.0,
        client_mode=False,
    )


@pytest.mark.parametrize(
    ("latest", "epoch", "samples", "eta"),
    [
        pytest.param(None, 6, 30, 1002.0, id="a lone claim far ahead leads nobody on"),
        pytest.param(6, 6, 30, 1002.0, id="one that nothing bears out leads nobody on"),
        pytest.param(3, 5, 20, 1003.0, id="this peer believes itself"),
    ],
)
def test_epochs_beyond_what_is_known_of_the_others_add_no_samples(latest, epoch, samples, eta) -> None:
    """Lineages tell the Optimizer how far the others are; what a peer reports beyond that counts as nothing."""
    progress = estimate_global_progress(
        [report(2, 1 << 40, 7, 1.0), report(3, 6, 30, 1.0)],
        report(1, 5, 20, 29.0),
        target_batch_size=92 if latest != 3 else 113,
        now=1000.0,
        options=RefreshOptions(),
        latest_epoch=latest,
    )
    assert (progress.epoch, progress.samples_accumulated) == (epoch, samples)
    assert progress.eta_next_epoch == pytest.approx(eta)
    assert progress.num_peers == 3


@pytest.mark.parametrize(
    ("own", "reported", "latest"),
    [(3, [], 3), (0, [50], 50), (0, [50, 51], 51), (0, [50, 50 + FAR_AHEAD], 50 + FAR_AHEAD), (5, [5, 1 << 40], 5)],
)
def test_which_epoch_is_borne_out_by_reports_alone(own, reported, latest) -> None:
    assert borne_out(own, reported) == latest


@pytest.mark.parametrize("change", [LIES[3], *soak([LIES[0]])], ids=str)
def test_an_epoch_neither_ends_early_nor_takes_longer(change) -> None:
    """Beside a stranger who reports nonsense under the run's key, two trainers keep their pace."""

    async def main(lying: bool) -> tuple[float, set[int]]:
        async with Swarm() as swarm:
            stranger = await swarm.node()
            trainers = [await swarm.trainer() for _ in range(2)]
            await together(*(trainer.train(2) for trainer in trainers))
            own = trainers[0]
            task = asyncio.create_task(lie(stranger, [change] if lying else [{}], epoch=lambda: own.epoch))
            began = asyncio.get_running_loop().time()
            await together(*(trainer.train(6) for trainer in trainers))
            task.cancel()
            await asyncio.wait([task])
            assert own.core.tracker.global_epoch <= 6
            return asyncio.get_running_loop().time() - began, {epoch.samples for epoch in own.epochs}

    honest, usual = virtual_time.run(main(False), seed=4)
    seconds, samples = virtual_time.run(main(True), seed=4)
    assert min(samples) >= 24 <= min(usual)
    assert seconds <= 2 * honest + 2 * 1.5, "4 epochs: at most two waits in vain, or one trainer's pace instead of two"


@pytest.mark.parametrize("weight", [10**18, *soak([10**15])])
def test_a_member_that_claims_more_samples_than_can_be_counted_breaks_nobody(weight) -> None:
    """Its gradients rule the average, which nobody can help; the others' reports and counts stay readable."""

    async def main() -> None:
        async with Swarm() as swarm:
            honest, liar = [await swarm.trainer() for _ in range(2)]
            freeze = liar.core.work.freeze

            async def lie() -> Weighed:
                return Weighed(weight, float(weight)) if (await freeze()).samples else Weighed()

            liar.core.work.freeze = lie
            await together(*(trainer.train(4) for trainer in (honest, liar)))
            assert honest.core.report().samples_seen == honest.core.position.samples == MAX_COUNT
            assert all(epoch.samples <= MAX_COUNT for epoch in honest.epochs)

    virtual_time.run(main(), seed=2)
