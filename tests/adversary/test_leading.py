"""What a leader that lies about its group gets: a group of nobody, and no group to lead soon after."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.group import Member
from swarmcli.averaging.seats import Seats
from swarmcli.errors import SwarmError
from swarmcli.events import EpochAdvanced, Event, RoundFinished
from swarmcli.network.identity import Identity, PeerID
from tests.adversary.company import go_on, liar_of, lineages, trained
from tests.adversary.leading import ALTERED, alter_list, begin_two, give_up, stuff
from tests.adversary.lies import Liar
from tests.adversary.lies.base import hurry_to_the_front
from tests.averaging.averagers import Averagers, Peer, all_outcomes
from tests.optim.optim_swarm import Trainer, digests, record, together
from tests.simulation import now, simulated
from tests.suites import soak

OPTIONS = AllreduceOptions(part_size_bytes=4 << 10, allreduce_timeout=60.0)
LONG = 2.0  # seconds that a sample takes where epochs are measured: what a search waits is little beside them


async def round_beside(first: Peer, honest: list[Peer]) -> list[RoundResult | SwarmError]:
    """What the honest make of a round; whatever the first makes of it is cancelled then."""
    for number, peer in enumerate([first, *honest]):
        for tensor in peer.core._tensors:
            tensor.fill_(float(number))
    lied = first.begin(timeout=600)
    outcomes = await all_outcomes([peer.begin(timeout=600) for peer in honest])
    lied.cancel()
    await asyncio.wait([asyncio.ensure_future(all_outcomes([lied]))])
    return outcomes


@pytest.mark.parametrize("count", [5, *soak([9, 16])])
@pytest.mark.parametrize("names", [list(ALTERED)[:4], list(ALTERED)[4:]], ids=", ".join)
@simulated
async def test_nobody_takes_part_in_a_group_that_says_of_it_what_it_did_not_offer(names: list[str], count: int) -> None:
    """Each of four followers is listed as something else; of more followers, the others as well."""
    async with Averagers(6) as swarm:
        first, *honest = peers = await swarm.add(count, allreduce=OPTIONS)
        await all_outcomes([peer.begin() for peer in peers])
        liar = liar_of(first)
        alters = [ALTERED[name] for name in names]
        alter_list(liar, lambda listed: [alters[place % 4](entry) for place, entry in enumerate(listed)])
        while not liar.told:  # leadership goes round
            began, outcomes = now(), await round_beside(first, honest)
        assert all(isinstance(outcome, RoundResult) for outcome in outcomes), outcomes
        leaders = {outcome.group.leader for outcome in outcomes if isinstance(outcome, RoundResult)}
        assert len(leaders) == 1 and first.peer_id not in leaders
        assert {tuple(peer.values) for peer in honest} == {(count / 2, count / 2)}, "the mean of 1 to n - 1"
        assert now() - began < 15
        assert all(peer.core.trust.has_no_seat(first.peer_id) for peer in honest)


@simulated
async def test_a_leader_that_pads_its_list_and_sends_its_parts_has_no_seat_in_the_next_group() -> None:
    async with Averagers(4) as swarm:
        *honest, last = peers = await swarm.add(4, allreduce=OPTIONS)
        await all_outcomes([peer.begin() for peer in peers])
        liar = liar_of(last)
        hurry_to_the_front(liar)
        keys = [
            Member(Identity.from_seed(number).peer_id, bandwidth=0.0, addresses=(f"memory://9.{number}.0.1:1",))
            for number in range(900, 906)
        ]
        alter_list(liar, lambda others: [*others, *keys])
        controls = [peer.begin(target=30.0, allow_retries=False) for peer in peers]
        for control in controls:
            control.report(10.0)
        assert not any(isinstance(each, RoundResult) for each in await all_outcomes(controls[:-1]))
        controls[-1].cancel()
        assert liar.told and all(peer.core.trust.has_no_seat(last.peer_id) for peer in honest)


@pytest.mark.parametrize("auxiliary", [False, True])
@simulated
async def test_a_leader_that_gives_work_to_nobody_spoils_two_rounds(auxiliary: bool) -> None:
    """It lists a key that nobody can reach as a reducer."""
    async with Averagers(6) as swarm:
        first, *honest = peers = await swarm.add(4, allreduce=OPTIONS)
        await all_outcomes([peer.begin() for peer in peers])
        liar, finder = liar_of(first), first.core.finder
        hurry_to_the_front(liar)
        divide, nobody = finder._divide, Member(Identity.from_seed(99).peer_id, auxiliary=auxiliary)

        def with_nobody(said: list[Member], seats: Seats) -> tuple[list[Member], tuple[float, ...]]:
            members, shares = divide(said, seats)
            liar.told.append("a group")
            return [*members, replace(nobody, addresses=("memory://nowhere:1",))], (*shares, 1.0)

        finder._divide = with_nobody  # type: ignore[method-assign]
        began, outcomes = now(), await round_beside(first, honest)
        assert all(isinstance(outcome, RoundResult) for outcome in outcomes), outcomes
        assert liar.told.count("a group") <= 2 and now() - began < 15
        assert all(peer.core.trust.has_no_seat(first.peer_id) for peer in honest)


@pytest.mark.parametrize("count", [3, *soak([16])])
@simulated
async def test_members_lead_in_turn_whatever_one_of_them_says(count: int) -> None:
    """One that says that it has looked the longest: before, it led every round."""
    async with trained(count, 0) as (_, trainers):
        liar, epochs = liar_of(trainers[0]), count + 2
        hurry_to_the_front(liar)
        await together(*(trainer.train(1) for trainer in trainers))
        led = leaders_seen_by(trainers[1])
        await together(*(trainer.train(1 + epochs) for trainer in trainers))
        assert liar.told and led.total() == epochs
        assert set(led) == {trainer.node.peer_id for trainer in trainers}
        assert set(led.values()) <= {1, 2}, led
        assert len(digests(trainers)) == 1


UNTRUE: dict[str, Callable[[list[Member]], list[Member]]] = {
    "out of turn": lambda followers: followers[::-1],
    "an accomplice without a bound": lambda followers: [replace(followers[0], ramp=math.inf), *followers[1:]],
    "the others held down": lambda followers: [replace(follower, ramp=1.0) for follower in followers],
}


@pytest.mark.parametrize(("lists", "count"), [*((lists, 3) for lists in UNTRUE), *soak([("out of turn", 16)])])
@simulated
async def test_a_leader_that_lists_its_followers_untruly_leads_nobody(lists: str, count: int) -> None:
    """Before, what counts of a member's weight was the leader's word."""
    async with trained(count) as (_, [first, *honest]):
        liar = liar_of(first)
        alter_list(liar, UNTRUE[lists])
        lying, led = asyncio.create_task(first.train(1000)), leaders_seen_by(honest[0])
        await together(*(trainer.train(count + 2) for trainer in honest))
        lying.cancel()
        assert liar.told and not led[first.node.peer_id]
        assert len(digests(honest)) == 1


def list_keys(liar: Liar) -> None:
    stuff(liar, [Identity.from_seed(f"key {number}".encode()) for number in range(6)])


@pytest.mark.parametrize(
    ("tell", "count", "liars", "epochs", "least"),
    [
        (begin_two, 4, 1, 8, 0.5),
        *soak(
            (tell, *case)
            for tell in (begin_two, give_up, list_keys)
            for case in [(4, 1, 24, 0.5), (8, 2, 100, 0.5), (16, 5, 200, 0.25)]
        ),
    ],
)
@simulated
async def test_leaders_that_spoil_their_rounds_leave_the_others_their_pace(
    tell: Callable[[Liar], None], count: int, liars: int, epochs: int, least: float
) -> None:
    """So much of what all would do without any wait, while those are found out. Before, one leader of two groups left a
    fifth, and the honest suspected each other."""
    async with trained(count, pace=LONG) as (_, trainers):
        honest, lying = trainers[liars:], [liar_of(trainer) for trainer in trainers[:liars]]
        for liar in lying:
            tell(liar)
        await go_on(epochs, trainers)
        assert any(liar.told for liar in lying)
        assert min(trainer.epoch for trainer in honest) > least * epochs
        banned = {liar.endpoint.peer_id for liar in lying if liar.told and tell is begin_two}
        for trainer in honest:  # their own signatures say so, to all of them
            assert all(map(trainer.core.work.averager.trust.is_banned, banned))


@pytest.mark.parametrize(("count", "liars", "epochs"), [(4, 1, 4), *soak([(16, 5, 30)])])
@simulated
async def test_keys_elsewhere_do_not_part_those_who_are_all_in_one_network(count: int, liars: int, epochs: int) -> None:
    """Most networks of the list are then those that its keys name. Before, the members left one after the other, for up
    to 70 s, and went on in groups of a few."""
    async with trained(count, pace=LONG, home="192.0.2.1") as (_, trainers):
        honest, lying = trainers[liars:], [liar_of(trainer) for trainer in trainers[:liars]]
        for liar in lying:
            list_keys(liar)
        rounds = record(honest[0].node, RoundFinished)
        await go_on(epochs, trainers)
        assert any(liar.told for liar in lying)
        assert not [event for event in rounds if 0 < len(event.members) < len(honest)], "alone, or nearly"
        assert len(lineages(honest)) == 1
        # Of 16 the honest alone compute half of what all do, and each liar costs a round.
        assert min(trainer.epoch for trainer in honest) >= 0.4 * epochs


def leaders_seen_by(trainer: Trainer) -> Counter[PeerID]:
    """How many of the rounds that this trainer sees commit from now on each peer has led."""
    led = Counter[PeerID]()

    def hear(event: Event) -> None:
        if isinstance(event, EpochAdvanced) and event.samples and trainer.core._group.last is not None:
            led[trainer.core._group.last.leader] += 1

    trainer.node.endpoint.events.subscribe(hear)
    return led


@pytest.mark.parametrize(("count", "keys"), [(4, 6), *soak([(8, 14), (16, 30)])])
@simulated
async def test_a_leader_that_lists_keys_of_its_own_gets_nobody_to_follow_their_votes(count: int, keys: int) -> None:
    async with Averagers(6) as swarm:
        first, *honest = peers = await swarm.add(count, allreduce=OPTIONS)
        await all_outcomes([peer.begin() for peer in peers])
        liar = liar_of(first)
        stuff(liar, [Identity.from_seed(f"phantom {number}".encode()) for number in range(keys)])
        good, disturbed = 0, 0.0
        while "an outcome" not in liar.told or good < 8:
            began, outcomes = now(), await round_beside(first, honest)
            disturbed = max(disturbed, now() - began)
            applied = [peer for peer, end in zip(honest, outcomes, strict=True) if isinstance(end, RoundResult)]
            assert len({tuple(peer.values) for peer in applied}) <= 1
            good += len(applied) == len(honest)
            if len(applied) < len(honest):
                assert "an outcome" in liar.told and not applied
                assert all(peer.core.trust.reason(first.peer_id).startswith("it listed") for peer in honest)
        assert disturbed < 15
