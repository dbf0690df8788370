"""What the end of an epoch costs where everyone is ready: delays on the way, counted under virtual time."""

import pytest

from tests.optim import optim_swarm
from tests.optim.optim_swarm import Swarm, Trainer, together
from tests.simulation import now, within
from tests.suites import soak

DELAY = 0.05  # seconds one way
# Progress to the leader, its word to begin, parts, averages, votes, the decision; and there and back to open a stream.
WAYS = 8
# And where somebody has drawn a part: there and back for its inputs, before the vote. With eight parts that is so in
# one epoch of 25, so there may be one among those that are looked at.
AUDIT = 2
# Each of eight members gets elements to reduce in each epoch. Of fewer, one that never got any may get some in a late
# epoch, and is dialed only then.
FEATURES = 64
EPOCHS = 8


def beyond_computing(trainer: Trainer, batches: int) -> list[float]:
    """Per epoch, in delays; the first epochs are those in which peers get to know each other."""
    return [(event.seconds - batches * trainer.pace) / DELAY for event in trainer.epochs[4:]]


@pytest.mark.parametrize(("batches", "peers"), [(1, 2), *soak([(1, 4), (4, 2), (4, 4), (1, 8), (4, 8)])])
@within(600)
async def test_an_epoch_ends_within_a_few_ways_through_the_network(
    peers: int, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optim_swarm, "FEATURES", FEATURES)
    async with Swarm(latency=DELAY) as swarm:
        target = 4 * peers * batches
        trainers = [await swarm.trainer(seed=1, pace=2.0, target=target) for _ in range(peers)]
        await together(*(trainer.core.join() for trainer in trainers))
        await together(*(trainer.train(EPOCHS) for trainer in trainers))
        for trainer in trainers:
            ways = beyond_computing(trainer, batches)
            assert min(ways) < WAYS
            assert max(ways) < WAYS + AUDIT
        assert now() < EPOCHS * (2.0 * batches + 1.0) + 10
