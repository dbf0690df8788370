"""A missed round costs a replay: late peers and newcomers with slow lines get in step, and nobody waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch

from swarmcli.averaging.round.archive import KeptRound, replay_prefix
from swarmcli.events import RoundsReplayed, StateDownloaded
from swarmcli.state.donor import state_method
from tests.optim.optim_swarm import Swarm, Trainer, adamw, digests, momentum, record, together
from tests.simulation import within
from tests.suites import soak

BULK = 2_000_000  # bytes that a newcomer needs besides parameters and statistics


async def miss(swarm: Swarm, trainers: list[Trainer], rounds: int) -> Trainer:
    """The first of `trainers` misses `rounds` rounds, which the others have completed when this returns."""
    late, others = trainers[0], trainers[1:]
    await together(*(trainer.train(3) for trainer in trainers))
    swarm.network.freeze(late.node.peer_id)
    await together(*(trainer.train(3 + rounds) for trainer in others))
    swarm.network.thaw(late.node.peer_id)
    return late


@pytest.mark.parametrize(
    ("make", "rounds"),
    [(adamw, 2), *soak([(momentum, 2), (momentum, 1), (adamw, 1)])],
    ids=["2", "2 of SGD", "1 of SGD", "1"],
)
@pytest.mark.parametrize("seed", [0, *soak([1, 2])])
@within(300)
async def test_a_peer_that_missed_one_or_two_rounds_replays_them(
    make: Callable[..., object], rounds: int, seed: int
) -> None:
    async with Swarm(seed=seed) as swarm:
        trainers = [await swarm.trainer(seed=1, make=make) for _ in range(3)]
        late = await miss(swarm, trainers, rounds)
        downloads, replays = record(late.node, StateDownloaded), record(late.node, RoundsReplayed)
        await asyncio.sleep(5)
        joining, told = asyncio.create_task(late.core.join()), set[str]()
        while not joining.done():
            looking = threading.Thread(target=lambda: told.add(late.core.exchange.on_its_way))  # as the terminal does
            looking.start()
            looking.join()
            await asyncio.sleep(0.001)
        assert joining.result()
        assert any("downloading a round that was missed" in text for text in told), "over slow lines that takes long"
        assert late.core.position == trainers[1].core.position
        assert len(digests(trainers)) == 1
        assert [(event.epoch, event.rounds) for event in replays] == [(3 + rounds, rounds)]
        await together(*(trainer.train(5 + rounds) for trainer in trainers))
        assert len(digests(trainers)) == 1 and max(late.used) == 4 + rounds
        assert not downloads


@pytest.mark.parametrize("missing", ["another chain", *soak(["served by nobody", "other averages"])])
@within(300)
async def test_without_the_right_rounds_the_state_is_downloaded(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Swarm() as swarm:
        trainers = [await swarm.trainer(seed=1) for _ in range(3)]
        late = await miss(swarm, trainers, 2)
        fetch = late.core.work.averager.archive.fetch

        async def spoiled(*args: object, **options: object) -> KeptRound:
            kept = await fetch(*args, **options)  # type: ignore[arg-type]
            return replace(kept, record=msgspec.structs.replace(kept.record, group_id=bytes(32)))

        if missing == "another chain":
            monkeypatch.setattr(late.core.work.averager.archive, "fetch", spoiled)
        for trainer in trainers[1:]:
            archive = trainer.core.work.averager.archive
            if missing == "served by nobody":
                trainer.node.endpoint.withdraw(state_method(replay_prefix("run_grads")))
            if missing == "other averages":
                archive._rounds.clear()
        before, downloads = late.core.replica.state.digest(), record(late.node, StateDownloaded)
        await asyncio.sleep(5)
        assert await late.core.join()
        assert len(downloads) == 1 and late.core.replica.state.digest() != before
        assert len(digests(trainers)) == 1


@pytest.mark.parametrize(("seed", "size"), [(0, BULK), *soak([(1, 20 * BULK), (2, 20 * BULK)])])
@within(1000)
async def test_a_download_longer_than_several_epochs_ends_in_step_and_stalls_nobody(seed: int, size: int) -> None:
    async with Swarm(seed=seed) as swarm:
        extra, other = [torch.zeros(size, dtype=torch.bool)], [torch.ones(size, dtype=torch.bool)]
        veterans = [await swarm.trainer(seed=1, pace=0.5, make=adamw, extra_tensors=extra) for _ in range(2)]
        await together(*(trainer.train(3) for trainer in veterans))
        usual = max(epoch.seconds for epoch in veterans[0].epochs[1:])
        newcomer = await swarm.trainer(seed=2, pace=0.5, make=adamw, extra_tensors=other)
        for veteran in veterans:  # all together they would take four epochs for the download
            swarm.network.set_bandwidth(veteran.node.peer_id, size / (4 * usual) / len(veterans))
        downloads, replays = record(newcomer.node, StateDownloaded), record(newcomer.node, RoundsReplayed)
        await together(*(trainer.train(11) for trainer in [*veterans, newcomer]))
        assert max(epoch.seconds for epoch in veterans[0].epochs[1:]) < 1.3 * usual
        (download,) = downloads
        assert sum(event.rounds for event in replays) >= 3
        # Four epochs of download and a little, since rounds use the lines too; and two until it is in a group.
        assert download.seconds < 4.7 * usual
        assert min(newcomer.used) <= download.epoch + 10 and max(newcomer.used) == 10, "it contributes"
        assert len(digests([*veterans, newcomer])) == 1
        assert torch.equal(newcomer.core.replica.state.extra_tensors[0], extra[0])


@pytest.mark.parametrize("strips", [True, *soak([False])], ids=["without a certificate", "certified"])
@within(300)
async def test_one_of_four_that_keeps_other_averages_of_a_round_makes_nobody_step_with_them(
    strips: bool,
) -> None:
    async with Swarm() as swarm:
        trainers = [await swarm.trainer(seed=1) for _ in range(4)]
        late = await miss(swarm, trainers, 1)
        for liar in trainers[1:3]:  # so that it is asked first, whoever that is
            rounds = liar.core.work.averager.archive._rounds
            for place, kept in enumerate(rounds):
                told = msgspec.structs.replace(kept.record, certificate=None) if strips else kept.record
                rounds[place] = KeptRound(told, [2 * average for average in kept.averages])
        await asyncio.sleep(5)
        assert await late.core.join()
        assert late.core.position == trainers[3].core.position
        assert len(digests(trainers)) == 1
