"""What a leader that lies about its group gets: a group of nobody, and no group to lead soon after."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import pytest

from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.control import RoundResult
from swarmcli.events import EpochAdvanced, Event, RoundFinished
from swarmcli.network.identity import Identity, PeerID
from swarmcli.testing import virtual_time
from tests.adversary.leading import ALTERED, alter_entries, alter_list, begin_two, give_up, hurry_to_the_front, stuff
from tests.adversary.lies import Liar
from tests.averaging.averagers import Averagers, all_outcomes
from tests.optim.optim_swarm import TARGET, Swarm, Trainer, digests, together
from tests.suites import soak

OPTIONS = AllreduceOptions(part_size_bytes=4 << 10, allreduce_timeout=60.0)


@pytest.mark.parametrize("count", [4, *soak([8, 16])])
@pytest.mark.parametrize("name", ALTERED)
def test_nobody_takes_part_in_a_group_that_says_of_it_what_it_did_not_offer(name: str, count: int) -> None:
    async def main() -> None:
        async with Averagers(6) as swarm:
            peers = await swarm.add(count, allreduce=OPTIONS)
            await all_outcomes([peer.begin() for peer in peers])
            first, *honest = peers
            liar = Liar(random.Random(0), first.endpoint, first.node, first.core)
            alter_entries(liar, ALTERED[name])
            while not liar.told:  # leadership goes round
                for number, peer in enumerate(peers):
                    for tensor in peer.core._tensors:
                        tensor.fill_(float(number))
                lied, began = first.begin(timeout=600), asyncio.get_running_loop().time()
                outcomes = await all_outcomes([peer.begin(timeout=600) for peer in honest])
                lied.cancel()
                await asyncio.wait([asyncio.ensure_future(all_outcomes([lied]))])
            assert all(isinstance(outcome, RoundResult) for outcome in outcomes), outcomes
            leaders = {outcome.group.leader for outcome in outcomes if isinstance(outcome, RoundResult)}
            assert len(leaders) == 1 and first.peer_id not in leaders
            assert {tuple(peer.values) for peer in honest} == {(len(peers) / 2, len(peers) / 2)}, (
                "the mean of 1 to n - 1"
            )
            assert asyncio.get_running_loop().time() - began < 15
            assert all(peer.core.doubts.has_no_seat(first.peer_id) for peer in honest)

    virtual_time.run(main(), timeout=3600)


@pytest.mark.parametrize("count", [4, *soak([8, 16])])
def test_no_trainer_loses_its_average_by_being_entered_as_an_auxiliary(count: int) -> None:
    async def main() -> None:
        async with Swarm(3) as swarm:
            trainers = [await swarm.trainer(seed=1, batch_size=1, pace=2.0) for _ in range(count)]
            first, *honest = trainers
            await together(*(trainer.core.join() for trainer in trainers))
            await together(*(trainer.train(1) for trainer in trainers))
            liar = Liar(random.Random(0), first.node.endpoint, averager=first.core.work.averager)
            alter_entries(liar, ALTERED["an auxiliary"])
            lying = asyncio.create_task(first.train(1000))
            usual, patience = TARGET * 2.0 / (count - 1), honest[0].core.config.matchmaking_time
            epoch = 1
            while not liar.told:
                epoch, began = epoch + 1, asyncio.get_running_loop().time()
                await together(*(trainer.train(epoch) for trainer in honest))
                assert asyncio.get_running_loop().time() - began < usual + patience + 10
            assert len({trainer.core.position.lineage for trainer in honest}) == 1
            assert len(digests(honest)) == 1
            lying.cancel()

    virtual_time.run(main(), timeout=3600)


@pytest.mark.parametrize("count", [4, *soak([8, 16])])
def test_members_lead_in_turn_whatever_one_of_them_draws(count: int) -> None:
    """It begins each search with the best of 2,000 ids: before, it led every round."""

    async def main() -> None:
        async with Swarm(3) as swarm:
            trainers = [await swarm.trainer(seed=1, batch_size=1, pace=2.0) for _ in range(count)]
            first, *honest = trainers
            liar = Liar(random.Random(0), first.node.endpoint, averager=first.core.work.averager)
            hurry_to_the_front(liar)
            await together(*(trainer.core.join() for trainer in trainers))
            await together(*(trainer.train(1) for trainer in trainers))
            led, epochs = Counter[PeerID](), 3 * count
            record_leaders(honest[0], led)
            await together(*(trainer.train(1 + epochs) for trainer in trainers))
            assert liar.told and led.total() == epochs
            assert set(led) == {trainer.node.peer_id for trainer in trainers}
            assert set(led.values()) <= {2, 3, 4}, led
            assert len(digests(trainers)) == 1

    virtual_time.run(main(), timeout=3600)


@pytest.mark.parametrize("count", [4, *soak([8, 16])])
def test_a_leader_that_lists_its_followers_out_of_turn_leads_nobody(count: int) -> None:
    async def main() -> None:
        async with Swarm(3) as swarm:
            trainers = [await swarm.trainer(seed=1, batch_size=1, pace=2.0) for _ in range(count)]
            first, *honest = trainers
            await together(*(trainer.core.join() for trainer in trainers))
            await together(*(trainer.train(1) for trainer in trainers))
            liar = Liar(random.Random(0), first.node.endpoint, averager=first.core.work.averager)
            alter_list(liar, lambda followers: followers[::-1])
            lying = asyncio.create_task(first.train(1000))
            led = Counter[PeerID]()
            record_leaders(honest[0], led)
            await together(*(trainer.train(2 * count) for trainer in honest))
            assert liar.told and not led[first.node.peer_id]
            assert len(digests(honest)) == 1
            lying.cancel()

    virtual_time.run(main(), timeout=3600)


def list_keys(liar: Liar) -> None:
    stuff(liar, [Identity.from_seed(f"key {number}".encode()) for number in range(6)])


@pytest.mark.parametrize(
    ("count", "liars", "epochs", "least"), [(4, 1, 24, 0.5), *soak([(8, 2, 100, 0.5), (16, 5, 200, 0.25)])]
)
@pytest.mark.parametrize("tell", [begin_two, give_up, list_keys])
def test_leaders_that_spoil_their_rounds_leave_the_others_their_pace(
    tell: Callable[[Liar], None], count: int, liars: int, epochs: int, least: float
) -> None:
    """So much of what all would do without any wait, while those are found out. Before, one leader of two groups left a
    fifth, and the honest doubted each other."""

    async def main() -> None:
        async with Swarm(3) as swarm:
            trainers = [await swarm.trainer(seed=1, batch_size=1, pace=2.0) for _ in range(count)]
            honest = trainers[liars:]
            await together(*(trainer.core.join() for trainer in trainers))
            await together(*(trainer.train(1) for trainer in trainers))
            lying = [
                Liar(random.Random(0), trainer.node.endpoint, averager=trainer.core.work.averager)
                for trainer in trainers[:liars]
            ]
            for liar in lying:
                tell(liar)
            tasks = [asyncio.create_task(trainer.train(1000)) for trainer in trainers]
            await asyncio.sleep(epochs * TARGET * 2.0 / count)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert any(liar.told for liar in lying)
            assert min(trainer.epoch for trainer in honest) > least * epochs
            banned = {liar.endpoint.peer_id for liar in lying if liar.told and tell is begin_two}
            for trainer in honest:  # their own signatures say so, to all of them
                assert all(map(trainer.core.work.averager.bans.is_banned, banned))

    virtual_time.run(main(), timeout=3600)


@pytest.mark.parametrize(("count", "liars", "epochs"), [(8, 2, 24), *soak([(16, 5, 30)])])
def test_keys_elsewhere_do_not_part_those_who_are_all_in_one_network(count: int, liars: int, epochs: int) -> None:
    """Most networks of the list are then those that its keys name. Before, the members left one after the other, for up
    to 70 s, and went on in groups of a few."""

    async def main() -> None:
        async with Swarm(3, home="192.0.2.1") as swarm:
            trainers = [await swarm.trainer(seed=1, batch_size=1, pace=2.0) for _ in range(count)]
            honest = trainers[liars:]
            await together(*(trainer.core.join() for trainer in trainers))
            await together(*(trainer.train(1) for trainer in trainers))
            lying = [
                Liar(random.Random(0), trainer.node.endpoint, averager=trainer.core.work.averager)
                for trainer in trainers[:liars]
            ]
            for liar in lying:
                list_keys(liar)
            alone = list[Event]()
            honest[0].node.endpoint.events.subscribe(
                lambda e: alone.append(e) if isinstance(e, RoundFinished) and 0 < len(e.members) < len(honest) else None
            )
            tasks = [asyncio.create_task(trainer.train(1000)) for trainer in trainers]
            await asyncio.sleep(epochs * TARGET * 2.0 / count)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert any(liar.told for liar in lying) and not alone
            assert len({trainer.core.position.lineage for trainer in honest}) == 1
            # Of 16 the honest alone compute half of what all do, and each liar costs a round.
            assert min(trainer.epoch for trainer in honest) >= 0.4 * epochs

    virtual_time.run(main(), timeout=3600)


def record_leaders(trainer: Trainer, led: Counter[PeerID]) -> None:
    """How many of the rounds that this trainer sees commit each peer has led."""

    def hear(event: Event) -> None:
        if isinstance(event, EpochAdvanced) and event.samples and trainer.core._group.last is not None:
            led[trainer.core._group.last.leader] += 1

    trainer.node.endpoint.events.subscribe(hear)


@pytest.mark.parametrize(("count", "keys"), [(4, 6), *soak([(8, 14), (16, 30)])])
def test_a_leader_that_lists_keys_of_its_own_gets_nobody_to_follow_their_votes(count: int, keys: int) -> None:
    async def main() -> None:
        async with Averagers(6) as swarm:
            peers = await swarm.add(count, allreduce=OPTIONS)
            await all_outcomes([peer.begin() for peer in peers])
            first, *honest = peers
            liar = Liar(random.Random(0), first.endpoint, first.node, first.core)
            stuff(liar, [Identity.from_seed(f"phantom {number}".encode()) for number in range(keys)])
            good, disturbed = 0, 0.0
            while "an outcome" not in liar.told or good < 8:
                for number, peer in enumerate(peers):
                    for tensor in peer.core._tensors:
                        tensor.fill_(float(number))
                lied, began = first.begin(timeout=600), asyncio.get_running_loop().time()
                outcomes = dict(
                    zip(honest, await all_outcomes([peer.begin(timeout=600) for peer in honest]), strict=True)
                )
                lied.cancel()
                await asyncio.wait([asyncio.ensure_future(all_outcomes([lied]))])
                applied = [peer for peer, outcome in outcomes.items() if isinstance(outcome, RoundResult)]
                assert len({tuple(peer.values) for peer in applied}) <= 1
                good += len(applied) == len(honest)
                disturbed = max(disturbed, asyncio.get_running_loop().time() - began)
                if len(applied) < len(honest):
                    assert "an outcome" in liar.told and not applied
                    assert all(peer.core.doubts.reason(first.peer_id).startswith("it listed") for peer in honest)
            assert disturbed < 15

    virtual_time.run(main(), timeout=3600)
