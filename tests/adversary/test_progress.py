"""Members that claim samples which they never hand in, or keep those of others out: epochs go by samples that are
there, and they go on."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from swarmcli.averaging.audit.signed import digest_of
from swarmcli.averaging.group import Member
from swarmcli.averaging.round.buffers import Average, root_of
from swarmcli.averaging.seats import Seats
from swarmcli.averaging.step_control import RoundRequest, StepControl
from swarmcli.errors import RoundFailed
from swarmcli.network import Identity
from tests.adversary.company import go_on, liar_of, round_beside, trained
from tests.adversary.leading import alter_list
from tests.adversary.lies import Liar
from tests.adversary.lies.base import hurry_to_the_front, on_each_exchange
from tests.averaging.averagers import Averagers, Peer, all_results
from tests.averaging.rounds import Kind
from tests.averaging.rounds import Swarm as RoundSwarm
from tests.optim.optim_swarm import TARGET, Swarm, Trainer, until
from tests.simulation import simulated
from tests.suites import soak


def claim(trainer: Trainer, *, leads: bool = False) -> Liar:
    """It has all samples of each epoch at once, by its own word, and hands in none. With `leads` it gets to the front,
    and begins as soon as two follow it."""
    liar = liar_of(trainer)
    assert liar.averager is not None
    begin, tracker = liar.averager.begin_round, trainer.core.tracker
    report = tracker.report_local_progress

    def begin_round(request: RoundRequest) -> StepControl:
        control = begin(request)
        control.report(float(TARGET))
        control.begun.add_done_callback(
            lambda begun: liar.told.append("a claim") if control.group is not None else None
        )
        return control

    liar.averager.begin_round = begin_round  # type: ignore[method-assign]
    tracker.report_local_progress = lambda epoch, samples, update=True: report(epoch, TARGET, update)  # type: ignore[method-assign,misc]
    if leads:
        hurry_to_the_front(liar)
        hurry(liar)
    return liar


def hurry(liar: Liar) -> None:
    """Where it leads, it begins as soon as two follow it."""
    assert liar.averager is not None
    finder = liar.averager.finder
    new_search = finder._new_search

    def search_in_haste(control: StepControl, gathered: bytes) -> object:
        search = new_search(control, gathered)
        lobby = search.lobby
        lobby.due_at = lambda now, **_: now if len(lobby) > 2 else math.inf  # type: ignore[method-assign]
        return search

    finder._new_search = search_in_haste  # type: ignore[assignment]


def list_keys(trainer: Trainer) -> Liar:
    """It computes as the others do. Where it leads, it begins as soon as two follow it, with a key that claims all."""
    liar = liar_of(trainer)
    key = Member(Identity.from_seed(99).peer_id, claim=float(TARGET))
    hurry(liar)
    alter_list(liar, lambda followers: [*followers, key])
    return liar


def keep_out(peer: Trainer | Peer) -> Liar:
    """It averages its own parts of nobody else's gradients."""
    liar = liar_of(peer)

    def alter(round_: Any) -> None:
        reducer = round_._reducer
        if reducer is not None and reducer.parts:
            liar.told.append("alone")
            finish = reducer._finish

            def finish_alone(position: int) -> Any:
                for member, sender in reducer._senders.items():
                    if member != round_.mates.me:
                        sender.counts = 0.0
                return finish(position)

            reducer._finish = finish_alone

    on_each_exchange(liar, alter)
    return liar


async def come_again(swarm: Swarm, told: list[str]) -> None:
    """Under a new key each time that a round has begun with the last one."""
    while True:
        trainer = await swarm.trainer(seed=1)
        await trainer.core.join()
        liar = claim(trainer)
        lying = asyncio.create_task(trainer.follow(1000))
        try:
            await until(lambda liar=liar: bool(liar.told))  # type: ignore[misc]
            await asyncio.sleep(0.1)
        finally:
            told += liar.told
            lying.cancel()
        await swarm.kill(trainer)


LIES: dict[str, Callable[[Trainer], Liar]] = {
    "member": claim,
    "leader": lambda trainer: claim(trainer, leads=True),
    "reducer": keep_out,
    "lister": list_keys,
}
CASES = [("member", 4, 1, 3)]
LARGER = [(who, count, liars, 15) for count, liars in [(4, 1), (8, 2), (16, 5)] for who in LIES]


@pytest.mark.parametrize(
    ("who", "count", "liars", "epochs"),
    [*CASES, *soak([*LARGER, *(("stranger", count, liars, 15) for count, liars in [(4, 1), (8, 2)])])],
)
@simulated
async def test_samples_that_nobody_hands_in_end_no_epoch_and_hold_none_up(
    who: str, count: int, liars: int, epochs: int
) -> None:
    async with trained(count, 2, pace=16 * (count - liars) / TARGET) as (swarm, trainers):
        honest, hostile = trainers[:-liars], trainers[-liars:]
        told: list[str] = []
        if who == "stranger":
            for trainer in hostile:
                await trainer.core.shutdown()
            lying = [come_again(swarm, told) for _ in hostile]
        else:
            for trainer in hostile:
                told = LIES[who](trainer).told
            does = Trainer.train if who in {"reducer", "lister"} else Trainer.follow
            lying = [does(trainer, 10_000) for trainer in hostile]
        await go_on(epochs, honest, *lying)
        advanced = [event for trainer in honest for event in trainer.epochs[2:]]
        samples = {event.epoch: event.samples for event in advanced if event.samples}  # 0: it followed the others
        print(f"{who} {count}: {len(samples)} epochs, samples {list(samples.values())}, lies {len(told)}")
        assert told and all(each >= TARGET / 2 for each in samples.values())
        # A stranger is killed in its round: that costs as much without a claim. The last two compute as well.
        slower = {"stranger": 2.5, "reducer": 1.25, "lister": 1.25}.get(who, 2.0)
        whole = TARGET / len(honest) / math.ceil(TARGET / len(honest))  # an epoch takes as long as whole samples do
        assert (epochs - 1) * whole / slower <= len(samples) == len({event.lineage for event in advanced})
        assert max(trainer.epoch for trainer in honest) - min(trainer.epoch for trainer in honest) <= 1


@simulated
async def test_a_reducer_that_keeps_the_others_out_costs_a_round_once_and_reduces_nothing() -> None:
    async with Averagers(5) as swarm:
        *honest, last = peers = await swarm.add(4, shapes=((200, 200), (40,)))
        await all_results([peer.begin() for peer in peers])
        liar = keep_out(last)
        for _ in range(5):
            results = await round_beside(honest, last)
            assert {peer.peer_id for peer in honest} <= set(results[0].contributors)
        disturbed = [each.outcome for each in honest[0].rounds].count("failed")
        assert liar.told and 1 <= disturbed <= 2, "when it is found out, and once more where it leads"
        assert not results[-1].reduced.get(last.peer_id)


@simulated
async def test_a_leader_that_gives_all_work_to_itself_averages_nothing_alone() -> None:
    async with Averagers(5) as swarm:
        *honest, last = peers = await swarm.add(4, shapes=((200, 200), (40,)))
        await all_results([peer.begin() for peer in peers])
        liar = keep_out(last)
        hurry_to_the_front(liar)
        divide = last.core.finder._divide

        def alone(said: list[Member], seats: Seats) -> Any:
            return divide(said, seats)[0], (1.0, *(0.0 for _ in said[1:]))

        last.core.finder._divide = alone  # type: ignore[method-assign]
        for _ in range(3):
            results = await round_beside(honest, last)
            assert {peer.peer_id for peer in honest} <= set(results[0].contributors)
        assert liar.told


@simulated
async def test_a_reducer_that_keeps_the_others_out_gets_no_vote_by_an_accomplice_that_gives_copies() -> None:
    async with Averagers(5) as swarm:
        peers = await swarm.add(8, shapes=((200, 200), (40,)))
        await all_results([peer.begin() for peer in peers])
        *honest, helper, last = peers
        liar = keep_out(last)
        on_each_exchange(liar_of(helper), lambda exchange: setattr(exchange, "_take_up", takes_all(exchange)))
        on_each_exchange(liar_of(last), lambda exchange: setattr(exchange, "_take_up", takes_all(exchange)))
        for _ in range(2):
            results = await round_beside(honest, helper, last)
            assert {results[0].weights.get(peer.peer_id) for peer in honest} == {1.0}, results[0].left_out
        assert liar.told


@simulated
async def test_a_reducer_that_names_who_has_sent_nothing_makes_no_honest_one_fail() -> None:
    async with RoundSwarm([Kind(weight=float(number < 2)) for number in range(5)]) as swarm:
        service = swarm.peers[0].service

        def names_all(exchange: Any) -> None:
            finish = exchange._reducer._finish

            def with_all(position: int) -> Average:
                average = finish(position)
                named = tuple(range(5)), (1.0,) * 5
                digest = digest_of(average.part.index, *named, average.message)
                return replace(average, senders=named[0], weights=named[1], digest=digest)

            exchange._reducer._finish = with_all

        averager = SimpleNamespace(_service=service)
        on_each_exchange(Liar(random.Random(0), swarm.peers[0].endpoint, averager=averager), names_all)  # type: ignore[arg-type]
        for outcome in (await swarm.round())[1:]:
            assert isinstance(outcome, RoundFailed) and outcome.suspects == (swarm.peers[0].peer_id,)


def takes_all(exchange: Any) -> Callable[[list[Average]], None]:
    """It has all averages, whatever is wrong with them."""

    def take(averages: list[Average]) -> None:
        own = [each for each in averages if each.part.reducer == exchange.mates.me]
        if own:
            exchange._means.signed.sign(exchange.mates.me, exchange.mates.endpoint.identity, root_of(own))
        exchange.holdings.put(averages)

    return take
