"""Who has drifted is found from the sketches of all, alike at every member; one liar makes nobody download."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from swarmcli.events import DriftMeasured, Events, PeerRefused
from swarmcli.network import wire
from swarmcli.network.identity import Identity, PeerID
from swarmcli.optim.state.drift import (
    BUCKETS,
    DRIFT,
    Comparison,
    DriftMonitor,
    DriftOptions,
    MemberNote,
    Sketch,
    compare,
)
from swarmcli.optim.state.replica import InPlace, Replica
from swarmcli.optim.state.training_state import TrainingState
from swarmcli.testing import virtual_time


def peer(number: int) -> PeerID:
    return PeerID(number.to_bytes(32, "big"))


def compared(*offsets: float, scale: float = 1.0, silent: int = 0) -> Comparison:
    """Of members whose states are so far apart, along one direction, relative to their length of 1 (times `scale`)."""
    sketches = {
        peer(number): Sketch((scale, scale * offset, *[0.0] * (BUCKETS - 2))) for number, offset in enumerate(offsets)
    }
    return compare(sketches, len(offsets) + silent, 1e-3)


TABLE = [
    # offsets, strays, disagree
    ((0.0,), [], False),
    ((0.0, 0.0), [], False),
    ((0.0, 0.0009), [], False),
    ((0.0, 0.004), [], True),
    ((0.0, 0.0, 0.002), [2], False),
    ((0.002, 0.0, 0.0), [0], False),
    ((0.0, 0.002, 0.004), [], True),
    ((0.0, 0.0, 0.5, 0.5), [], True),
    ((0.0, 0.0, 0.0, 0.5, 0.9), [3, 4], False),
    ((0.0, 0.0008, 0.0016), [], False),  # the one in the middle is close to both
    ((math.nan, 0.0), [0], False),
    ((math.inf, 0.0, 0.0), [0], False),
    ((math.nan, 0.0, 0.5), [0], True),  # a broken state is brought into no average
    ((math.nan, math.nan), [], False),  # nobody has anything to repair it from
]


@pytest.mark.parametrize(("offsets", "strays", "disagree"), TABLE)
def test_a_majority_stays_and_without_one_all_average(offsets: tuple, strays: list, disagree: bool) -> None:
    found = compared(*offsets)
    assert (found.strays, found.disagree) == (tuple(peer(number) for number in strays), disagree)


@given(
    st.lists(st.sampled_from([0.0, 1e-4, 0.002, 0.5, 1e9, math.nan]), min_size=1, max_size=9), st.floats(1e-20, 1e20)
)
def test_it_depends_on_ratios_and_a_majority_is_never_sent_away(offsets: list, scale: float) -> None:
    found, scaled = compared(*offsets), compared(*offsets, scale=scale)
    assert (scaled.strays, scaled.disagree) == (found.strays, found.disagree)
    honest = [index for index, offset in enumerate(offsets) if offset in (0.0, 1e-4)]
    if 2 * len(honest) > len(offsets):
        assert set(found.strays) == {peer(index) for index in range(len(offsets)) if index not in honest}


def test_distances_are_relative_to_the_usual_length() -> None:
    found = compared(0.0, 0.0, 0.25, scale=40.0)
    assert list(found.distances.values()) == [0.0, 0.0, pytest.approx(0.25)]
    assert compared(0.0, math.nan).distances[peer(1)] == math.inf


def test_members_that_told_nothing_count_as_not_close() -> None:
    """Otherwise a leader could leave out sketches until those that it likes are most of them."""
    assert compared(0.0, 0.0, 0.5, silent=1).strays == ()
    assert compared(0.0, 0.0, 0.0, 0.5, silent=1).strays == (peer(3),)
    assert not compared(0.0, 0.5, silent=1).disagree


def test_parameters_that_are_all_zero_can_be_compared() -> None:
    zero, one = Sketch((0.0,) * BUCKETS), Sketch((1.0,) * BUCKETS)
    assert compare({peer(0): zero, peer(1): zero}, 2, 1e-3).agree
    assert compare({peer(0): zero, peer(1): zero, peer(2): one}, 3, 1e-3).strays == (peer(2),)


class Peer:
    """A monitor of one parameter of four elements, with nothing around it."""

    def __init__(self, value: float = 1.0, *, tells: bool = True) -> None:
        self.identity = Identity.generate()
        self.peer_id = self.identity.peer_id
        self.seen: list[Any] = []
        events = Events()
        events.subscribe(self.seen.append)
        self.parameter = torch.nn.Parameter(torch.ones(4))
        state = TrainingState("run", torch.optim.SGD([self.parameter], lr=1.0))
        self.replica = Replica(state, InPlace([self.parameter]))
        node = SimpleNamespace(endpoint=SimpleNamespace(events=events, identity=self.identity))
        self.monitor = DriftMonitor(node, "run", self.replica, 1e-3)  # type: ignore[arg-type]
        self.monitor.note_members([self.peer_id] if tells else [])
        self.set(value)

    def set(self, value: float) -> None:
        with torch.no_grad():
            self.parameter.fill_(value)

    def look(self) -> None:
        virtual_time.run(self.monitor.look())

    def next_epoch(self) -> None:
        self.replica.state.position = self.replica.position.by_epoch(1)

    def sees(self, gathered: dict[PeerID, bytes]) -> tuple[bool, bool]:
        """Whether it finds itself to be a stray, and that the members disagree."""
        found = self.monitor.compare(gathered)
        return found is not None and self.monitor.is_stray(found), found is not None and found.disagree

    @property
    def told(self) -> bytes:
        told = self.monitor.told
        return b"" if told is None else wire.encode(told)

    @property
    def refused(self) -> list[str]:
        return [event.peer for event in self.seen if isinstance(event, PeerRefused) and event.what == "sketch"]


def group(peers: Sequence[Peer]) -> dict[PeerID, bytes]:
    for each in peers:
        each.look()
    return {each.peer_id: each.told for each in peers}


def test_all_find_the_same() -> None:
    peers = [Peer(), Peer(), Peer(1.5)]
    told = group(peers)
    found = [each.monitor.compare(told) for each in peers]
    assert len({(each.strays, each.disagree, *each.distances.values()) for each in found if each}) == 1
    assert [each.sees(told) for each in peers] == [(False, False), (False, False), (True, False)]
    assert [each.monitor.drift for each in peers] == [0.0, 0.0, pytest.approx(0.5)]
    event = next(event for event in peers[0].seen if isinstance(event, DriftMeasured))
    assert event.strays == (peers[2].peer_id.text,)


FAR = Sketch((1e6,) * BUCKETS).to_bytes()


def forge(liar: Peer, gathered: dict[PeerID, bytes], victim: Peer) -> dict[PeerID, bytes]:
    """The leader says that all others are where it is; only its own key is at hand."""
    lie = signed(liar, FAR)
    return {who: told if who == victim.peer_id else lie for who, told in gathered.items()}


def leave_out(liar: Peer, gathered: dict[PeerID, bytes], victim: Peer) -> dict[PeerID, bytes]:
    """The leader shows its own false sketch and the victim's, and nothing of the others."""
    kept = {liar.peer_id: signed(liar, FAR), victim.peer_id: gathered[victim.peer_id]}
    return {who: kept.get(who, b"") for who in gathered}


def leave_out_and_be_broken(liar: Peer, gathered: dict[PeerID, bytes], victim: Peer) -> dict[PeerID, bytes]:
    broken = signed(liar, Sketch((math.nan,) * BUCKETS).to_bytes())
    return leave_out(liar, gathered, victim) | {liar.peer_id: broken}


def tell_another(liar: Peer, gathered: dict[PeerID, bytes], victim: Peer) -> dict[PeerID, bytes]:
    return gathered | {liar.peer_id: signed(liar, FAR)}


def mirror(liar: Peer, gathered: dict[PeerID, bytes], victim: Peer) -> dict[PeerID, bytes]:
    """The opposite of the honest sketch, so that the mean of two is zero."""
    honest = Sketch.from_bytes(wire.decode(MemberNote, gathered[victim.peer_id]).sketch)
    return gathered | {liar.peer_id: signed(liar, Sketch(tuple(-value for value in honest.values)).to_bytes())}


def alter_the_victims(liar: Peer, gathered: dict[PeerID, bytes], victim: Peer) -> dict[PeerID, bytes]:
    return gathered | {victim.peer_id: signed(liar, FAR)}


def signed(liar: Peer, sketch: bytes) -> bytes:
    position = liar.replica.position
    return wire.encode(MemberNote(position.epoch, sketch, liar.identity.sign("sketch", position.lineage, sketch)))


LIES = [forge, leave_out, leave_out_and_be_broken, tell_another, mirror, alter_the_victims]


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("count", [2, 4])
def test_one_lying_leader_makes_no_honest_member_download(count: int, lie: Callable) -> None:
    peers = [Peer() for _ in range(count)]
    gathered = group(peers)
    liar = peers[0]
    for victim in peers[1:]:
        stray, disagree = victim.sees(lie(liar, gathered, victim))
        assert not stray
        assert not (disagree and count > 2)  # in a pair nobody knows which is right


@pytest.mark.parametrize("count", [3, 4, 8])
def test_an_honest_drifter_downloads_and_nobody_else(count: int) -> None:
    peers = [Peer(1.5), *(Peer() for _ in range(count - 1))]
    gathered = group(peers)
    assert [each.sees(gathered)[0] for each in peers] == [True] + [False] * (count - 1)


def test_a_drifter_downloads_though_another_lies() -> None:
    liar, drifter, *others = peers = [Peer(), Peer(1.5), *(Peer() for _ in range(6))]
    gathered = tell_another(liar, group(peers), drifter)
    assert drifter.sees(gathered) == (True, False)
    assert not any(each.sees(gathered)[0] for each in others)


def test_a_sketch_of_an_earlier_epoch_cannot_be_shown_again() -> None:
    peers = [Peer() for _ in range(3)]
    old = group(peers)[peers[2].peer_id]
    for each in peers:
        each.next_epoch()
    now = group(peers)
    forged = wire.encode(
        MemberNote(1, *(getattr(wire.decode(MemberNote, old), name) for name in ("sketch", "signature")))
    )
    for data in (old, forged):
        found = peers[1].monitor.compare(now | {peers[2].peer_id: data})
        assert found is not None
        assert set(found.distances) == {peers[0].peer_id, peers[1].peer_id}
    assert peers[1].refused == [peers[2].peer_id.text]  # of the old one it may be that the member is late


def test_a_leader_that_alters_what_this_peer_told_is_refused() -> None:
    peers = [Peer(), Peer(), Peer()]
    gathered = group(peers)
    assert peers[2].monitor.compare(gathered | {peers[2].peer_id: b""}) is None
    assert peers[2].refused == [peers[0].peer_id.text]


def test_in_a_large_group_the_first_tell_and_all_measure_themselves() -> None:
    peers = [Peer() for _ in range(DRIFT.tellers + 20)]
    for each in peers:
        each.monitor.note_members(other.peer_id for other in peers)
    peers[-1].set(-1.0)
    gathered = group(peers)
    assert [bool(data) for data in gathered.values()] == [True] * DRIFT.tellers + [False] * 20
    assert peers[-1].sees(gathered) == (True, False)
    assert peers[-1].monitor.drift == pytest.approx(2.0)
    assert peers[-2].sees(gathered) == (False, False)


def test_of_a_flood_of_false_sketches_only_so_many_are_looked_at() -> None:
    victim, other = Peer(), Peer()
    gathered = group([victim, other])
    flood = {peer(number): signed(other, FAR) for number in range(1000)}
    assert victim.monitor.compare({victim.peer_id: gathered[victim.peer_id]} | flood) is None
    assert len(victim.refused) == DRIFT.tellers - 1


def test_a_newcomer_tells_nothing_and_listens() -> None:
    newcomer = Peer(1.5, tells=False)
    peers = [newcomer, Peer(), Peer()]
    gathered = group(peers)
    assert gathered[newcomer.peer_id] == b""
    assert newcomer.sees(gathered) == (True, False)


def test_without_a_sketch_nothing_is_compared() -> None:
    peers = [Peer(), Peer(), Peer()]
    told = group(peers)
    peers[0].monitor.drop()
    assert peers[0].monitor.compare(told) is None
    assert peers[1].monitor.compare({peers[1].peer_id: told[peers[1].peer_id]}) is None


@pytest.mark.parametrize(
    "data",
    [b"\xc1", wire.encode([1, 2]), wire.encode({"epoch": "0"}), wire.encode(MemberNote(0, b"short")), b"\x80" * 300],
)
def test_what_is_no_sketch_is_refused_and_not_counted(data: bytes) -> None:
    peers = [Peer(), Peer(), Peer()]
    found = peers[0].monitor.compare(group(peers) | {peers[2].peer_id: data})
    assert found is not None
    assert set(found.distances) == {peers[0].peer_id, peers[1].peer_id}
    assert peers[0].refused == [peers[2].peer_id.text]


def test_one_that_is_not_finite_knows_it_and_says_a_number() -> None:
    peers = [Peer(), Peer(), Peer(math.nan)]
    assert peers[2].sees(group(peers)) == (True, False)
    assert peers[2].monitor.drift == DRIFT.most


def test_very_large_states_are_sketched_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmcli.optim.state.drift.DRIFT", DriftOptions(each_epoch=2))
    assert DRIFT.each_epoch > 1 << 20
    one = Peer()  # of four elements, so every third epoch
    sketched = []
    for epoch in range(7):
        one.look()
        if one.told:
            sketched.append(epoch)
        one.next_epoch()
    assert sketched == [0, 3, 6]
