"""Peers that come and go, clocks that jump, and peers of another run, seen from whole searches over the hash table."""

from __future__ import annotations

import asyncio
import statistics
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as changed

from swarmcli.averaging.find.messages import METHODS, Answer, Join, Offer, method_name
from swarmcli.averaging.group import Group
from swarmcli.errors import CallRefused
from tests.adversary.test_hearsay import evidence_against
from tests.averaging.searchers import Searcher, Searchers
from tests.simulation import now, within
from tests.suites import soak

MINUTE = 60.0


async def churn(swarm: Searchers, count: int, seconds: float, rate: float) -> None:
    """`count` peers search and work in turn, while `rate` of them per minute leave (half of them without a word)
    and as many join."""
    loop = asyncio.get_running_loop()
    tasks: dict[Searcher, asyncio.Task[None]] = {}

    async def enter() -> None:
        peer = await swarm.add()
        tasks[peer] = loop.create_task(peer.keep_searching(lambda: swarm.random.uniform(2.0, 4.0)))

    for _ in range(count):
        await enter()
    end = loop.time() + seconds
    while loop.time() < end:
        await asyncio.sleep(swarm.random.expovariate(2 * rate * count / MINUTE))
        if swarm.random.random() < 0.5:
            await enter()
            continue
        peer = swarm.random.choice(swarm.peers[3:])  # the first three are the contacts of newcomers
        kill = swarm.random.random() < 0.5
        if kill:
            await swarm.remove(peer, kill=True)
        tasks[peer].cancel()
        await asyncio.wait([tasks.pop(peer)])
        if not kill:
            await swarm.remove(peer, kill=False)
    for task in tasks.values():
        task.cancel()
    await asyncio.wait(tasks.values())


@pytest.mark.parametrize(("count", "seconds", "seed"), [(12, 15.0, 12), *soak([(32, 20.0, 1), (64, 12.0, 0)])])
@within(3600)
async def test_a_fifth_of_the_peers_leave_and_a_fifth_join_per_minute(count: int, seconds: float, seed: int) -> None:
    """At least 99% of the rounds form. `python -m benchmarks matchmaking` does it for longer and with more seeds."""
    async with Searchers(seed) as swarm:
        await churn(swarm, count, seconds, 0.2)
        waits = [wait for peer in swarm.peers for wait in peer.waits]
        failures = [failure for peer in swarm.peers for failure in peer.failures]
        assert len(swarm.gone) >= 1 and len(waits) > 2 * count
        assert len(failures) <= 0.01 * len(waits), f"seed {seed}: {failures}"
        assert max(waits) < swarm.options.min_matchmaking_time + 1.0, f"seed {seed}"
        sizes = [len(group) for peer in swarm.peers for group in peer.groups]
        assert statistics.median(sizes) > count / 2, f"seed {seed}: the swarm falls apart into small groups"


# The first one leads and notices it.
@pytest.mark.parametrize(("moment", "jump", "seed"), [(0.0, 600.0, 2), (0.06, 600.0, 0), (0.06, -600.0, 0)])
@within(3600)
async def test_a_clock_that_jumps_by_ten_minutes_in_the_middle(seed: int, jump: float, moment: float) -> None:
    """A peer that notices during its search that it has slept opens its connections again: the others begin without it.
    It is in the next group, though it takes all declarations of the others for expired."""
    loop = asyncio.get_running_loop()
    async with Searchers(seed) as swarm:
        peers = [await swarm.add() for _ in range(4)]
        others = [peer for peer in peers if peer is not peers[seed]]
        await asyncio.sleep(40)  # clocks have been compared, and step no more
        searches: dict[Searcher, asyncio.Task[Group | None]] = {}
        for turn in range(3):
            searches |= {p: loop.create_task(p.find()) for p in peers if p not in searches or searches[p].done()}
            await asyncio.sleep(moment)
            if turn == 0:
                peers[seed].jump[0] = jump
            groups = await asyncio.gather(*(searches[peer] for peer in others))
            await asyncio.wait(searches.values(), timeout=0.1)
            sizes = {len(group) for group in groups if group is not None}
            assert sizes == {4} or (turn == 0 and jump > 0 and sizes == {3})
            assert max(peer.waits[-1] for peer in others) < 1.5


@within(3600)
async def test_nobody_waits_for_one_that_came_last_and_was_killed_after_its_round() -> None:
    """The others follow their leader at the moment when it declares itself, and read the declaration only in their next
    search. The leader is dead by then, and they must not take it for a peer that has come back."""
    async with Searchers(0) as swarm:
        *peers, last = [await swarm.add() for _ in range(5)]
        await asyncio.gather(*(peer.find() for peer in (*peers, last)))
        early = [asyncio.ensure_future(peer.find()) for peer in peers]
        await asyncio.sleep(1.0)
        await asyncio.gather(*early, last.find())
        await swarm.remove(last, kill=True)
        for _ in range(3):
            await asyncio.gather(*(peer.find() for peer in peers))
            assert max(peer.waits[-1] for peer in peers) < 1.5


# Peers of another run


async def impostors(swarm: Searchers, count: int) -> tuple[Searcher, list[Searcher], list[Join]]:
    """A newcomer, `count` liars with other terms that claim to search since the beginning of time, and what each says
    to the newcomer. They refuse whoever asks them; the first is on the board, so that it is asked."""

    async def refuse(peer: Any, message: Join) -> Answer:
        return Answer("terms", keys=("seed",), since=0.0)

    liars = [await swarm.add() for _ in range(count)]
    victim, joins = await swarm.add(), []
    for liar in liars:
        search = asyncio.get_running_loop().create_task(liar.find())
        await asyncio.sleep(0.3)
        assert liar.finder.search is not None
        joins.append(Join(liar.finder.search.me, Offer(), {"seed": "other"}, 0.0, patience=5.0))
        search.cancel()
        await asyncio.wait([search])
        liar.node.endpoint.withdraw(*(method_name("test", message) for message in METHODS))
        liar.node.endpoint.serve(method_name("test", Join), Join, refuse)
    return victim, liars, joins


@pytest.mark.parametrize(("count", "honest"), [(1, 2), (1, 0), (2, 0)])
@within(3600)
async def test_a_newcomer_with_a_wrong_recipe_is_told_when_the_time_is_up_unless_one_of_its_kind_comes(
    count: int, honest: int
) -> None:
    async with Searchers(7) as swarm:
        victim, liars, joins = await impostors(swarm, count)
        began, search = now(), asyncio.get_running_loop().create_task(victim.find())
        await asyncio.sleep(0.5)
        for liar, join in zip(liars, joins, strict=True):
            with suppress(CallRefused):  # it has ended its search
                await liar.node.endpoint.call(victim.peer_id, method_name("test", Join), join, Answer, timeout=3)
        await asyncio.sleep(1.0)
        others = [await swarm.add() for _ in range(honest)]
        await asyncio.gather(search, *(peer.find() for peer in others))
        if honest:
            assert [len(peer.groups[0]) for peer in (victim, *others)] == [1 + honest] * (1 + honest), victim.failures
        else:
            assert "FingerprintError" in victim.failures[0] and "seed" in victim.failures[0]
            assert 4.9 < now() - began < 6.5


@within(3600)
async def test_nobody_asks_a_banned_peer_of_which_another_one_tells() -> None:
    async with Searchers(3) as swarm:
        victim, (namer, culprit), joins = await impostors(swarm, 2)
        asked, addresses = list[Searcher](), culprit.node.endpoint.addresses

        async def name(peer: Any, join: Join) -> Answer:
            asked.append(namer)
            return Answer(
                "ask", to=replace(join.candidate, peer_id=culprit.peer_id, addresses=addresses, search=bytes(16))
            )

        async def hear(peer: Any, join: Join) -> Answer:
            asked.append(culprit)
            return Answer("full")

        for peer, answer in ((namer, name), (culprit, hear)):
            peer.node.endpoint.withdraw(method_name("test", Join))
            peer.node.endpoint.serve(method_name("test", Join), Join, answer)
        victim.finder._trust.ban(evidence_against(culprit.node.endpoint.identity))
        search = asyncio.get_running_loop().create_task(victim.find())
        await asyncio.sleep(0.5)
        assert victim.finder.search is not None
        join = changed(joins[0], terms=victim.finder.search.own.terms)
        await namer.node.endpoint.call(victim.peer_id, method_name("test", Join), join, Answer, timeout=3)
        await asyncio.sleep(10)
        search.cancel()
        await asyncio.wait([search])
        assert set(asked) == {namer}
