"""Connections that end under watch, and peers whose terms differ."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.averaging.matchmaking.candidates import Candidate, Entry, rank_of
from swarmcli.averaging.matchmaking.watching import Conflicts, Watches
from swarmcli.errors import FingerprintError
from swarmcli.events import Event, Events, PeerRefused
from swarmcli.network.identity import PeerID
from swarmcli.testing import virtual_time
from tests.averaging.averagers import Averagers
from tests.averaging.table import peer_id


def entry(number: int, follows: PeerID | None = None) -> Entry:
    candidate = Candidate(peer_id(number), bytes(16), b"", True)
    return Entry(candidate, rank_of(candidate), since=0.0, expires=60.0, follows=follows)


def test_a_watched_peer_that_is_gone_is_told_once() -> None:
    async def main() -> None:
        async with Averagers(0) as swarm:
            me, dead, stranger, dropped = await swarm.add(4)
            for peer in (dead, dropped):
                await me.endpoint.connect(peer.endpoint.addresses[0], timeout=5)
            lost: list[PeerID] = []
            watches = Watches(me.endpoint, lost.append)
            for peer in (dead, dropped, me):
                watches.add(peer.peer_id)
                watches.add(peer.peer_id)
            watches.discard(dropped.peer_id)
            await asyncio.sleep(1)
            assert lost == []
            swarm.kill(dead)
            swarm.kill(dropped)
            await asyncio.sleep(1)
            assert lost == [dead.peer_id]
            watches.add(peer_id(77))  # nobody has ever been connected to this one
            await asyncio.sleep(0)
            assert lost == [dead.peer_id, peer_id(77)]
            watches.add(stranger.peer_id)
            watches.clear()

    virtual_time.run(main(), seed=0)


def test_conflicts_are_told_once_and_only_elders_count() -> None:
    heard: list[Event] = []
    events = Events()
    events.subscribe(heard.append)
    conflicts = Conflicts(events)
    for _ in range(2):
        conflicts.note(peer_id(1), ("seed",), since=50.0)
    assert [(event.peer, event.what) for event in heard if isinstance(event, PeerRefused)] == [
        (peer_id(1).text, "group")
    ]
    conflicts.check(since=40.0, enough=1)  # that one came later
    conflicts.note(peer_id(2), ("lr", "data"), since=30.0)
    with pytest.raises(FingerprintError, match="data, lr") as caught:
        conflicts.check(since=40.0, enough=1)
    assert caught.value.keys == ("data", "lr")


def test_elders_must_agree_with_each_other_and_nobody_with_the_newcomer() -> None:
    conflicts = Conflicts(Events())
    conflicts.note(peer_id(1), ("lr", "data"), since=30.0)
    conflicts.note(peer_id(2), ("seed",), since=30.0)
    conflicts.check(since=40.0, enough=2)  # each has terms of its own
    conflicts.note(peer_id(3), ("data", "lr"), since=30.0)
    with pytest.raises(FingerprintError):
        conflicts.check(since=40.0, enough=2)
    conflicts.agreed()
    conflicts.check(since=40.0, enough=1)


def test_conflicts_cover_those_who_follow_them() -> None:
    conflicts = Conflicts(Events())
    conflicts.note(peer_id(1), ("seed",), since=0.0)
    assert conflicts.cover([]) and conflicts.cover([entry(2, follows=peer_id(1))])
    assert not conflicts.cover([entry(2, follows=peer_id(1)), entry(3)])
