"""Who tells a sketch, what becomes of what others tell, and that everyone measures himself against those who told."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarmcli.events import DriftMeasured, Events, PeerRefused
from swarmcli.network import wire
from swarmcli.network.identity import PeerID
from swarmcli.optim.epoch.group import Told
from swarmcli.optim.state.comparison import MOST_DRIFT, SKETCHED_EACH_EPOCH, TELLERS, Comparison
from swarmcli.optim.state.replica import Replica
from swarmcli.optim.state.residence import InPlace
from swarmcli.optim.state.training_state import TrainingState
from swarmcli.testing import virtual_time


class Peer:
    """A comparison of one parameter of four elements, with nothing around it."""

    def __init__(self, number: int, value: float = 1.0, members: int = 3) -> None:
        self.peer_id = PeerID(number.to_bytes(32, "big"))
        self.events = Events()
        self.seen: list[Any] = []
        self.events.subscribe(self.seen.append)
        self.parameter = torch.nn.Parameter(torch.ones(4))
        state = TrainingState("run", torch.optim.SGD([self.parameter], lr=1.0))
        self.replica = Replica(state, InPlace([self.parameter]))
        node = SimpleNamespace(peer_id=self.peer_id, endpoint=SimpleNamespace(events=self.events))
        self.comparison = Comparison(node, "run", self.replica, 1e-3)  # type: ignore[arg-type]
        self.comparison.members = members
        with torch.no_grad():
            self.parameter.fill_(value)

    def look(self) -> None:
        virtual_time.run(self.comparison.look())

    @property
    def told(self) -> bytes:
        gathered = self.comparison.gathered
        return b"" if gathered is None else wire.encode(gathered)


def gathered(peers: Sequence[Peer]) -> dict[PeerID, bytes]:
    for peer in peers:
        peer.look()
    return {peer.peer_id: peer.told for peer in peers}


def test_all_come_to_the_same_verdict() -> None:
    peers = [Peer(0), Peer(1), Peer(2, 1.5)]
    told = gathered(peers)
    verdicts = [peer.comparison.judge(told) for peer in peers]
    assert all(verdict == verdicts[0] for verdict in verdicts)
    assert [peer.comparison.is_astray(verdicts[0]) for peer in peers] == [False, False, True]
    assert [peer.comparison.drift for peer in peers] == [0.0, 0.0, pytest.approx(0.5)]
    (event,) = [event for event in peers[0].seen if isinstance(event, DriftMeasured)]
    assert event.strays == (peers[2].peer_id.text,)


def test_in_a_large_group_some_tell_and_all_measure_themselves() -> None:
    members = 1000
    peers = [Peer(number, members=members) for number in range(members)]
    told = gathered(peers)
    tellers = {peer for peer, data in told.items() if data}
    assert 0.6 * TELLERS < len(tellers) < 1.5 * TELLERS
    silent = next(peer for peer in peers if peer.peer_id not in tellers)
    with torch.no_grad():
        silent.parameter.fill_(-1.0)
    silent.look()
    verdict = silent.comparison.judge(told)
    assert verdict is not None
    assert verdict.strays == ()
    assert silent.comparison.is_astray(verdict)
    assert silent.comparison.drift == pytest.approx(2.0)
    assert not peers[3].comparison.is_astray(verdict)
    for peer in peers:  # at another standing others tell
        peer.replica.state.standing = peer.replica.standing.by_epoch(1)
    assert {peer for peer, data in gathered(peers).items() if data} != tellers


def test_who_does_not_know_the_size_of_the_group_listens() -> None:
    newcomer = Peer(0, members=0)
    told = gathered([newcomer, Peer(1, 2.0), Peer(2, 2.0)])
    assert told[newcomer.peer_id] == b""
    verdict = newcomer.comparison.judge(told)
    assert verdict is not None
    assert newcomer.comparison.is_astray(verdict)


def test_without_a_sketch_there_is_no_verdict() -> None:
    peers = [Peer(0), Peer(1), Peer(2)]
    told = gathered(peers)
    peers[0].comparison.drop()
    assert peers[0].comparison.judge(told) is None
    assert peers[1].comparison.judge({peers[1].peer_id: told[peers[1].peer_id]}) is None
    assert peers[1].comparison.judge({}) is None


@pytest.mark.parametrize(
    "data",
    [b"\xc1", wire.encode([1, 2]), wire.encode({"epoch": "0"}), wire.encode(Told(0, b"short")), b"\x80" * 300],
)
def test_what_is_no_sketch_is_refused_and_not_counted(data: bytes) -> None:
    peers = [Peer(0), Peer(1), Peer(2)]
    told = gathered(peers) | {peers[2].peer_id: data}
    verdict = peers[0].comparison.judge(told)
    assert verdict is not None
    assert set(verdict.distances) == {peers[0].peer_id, peers[1].peer_id}
    (refused,) = [event for event in peers[0].seen if isinstance(event, PeerRefused)]
    assert (refused.peer, refused.what) == (peers[2].peer_id.text, "sketch")


def test_a_leader_that_alters_what_this_peer_told_is_not_believed() -> None:
    peers = [Peer(0), Peer(1), Peer(2)]
    told = gathered(peers)
    other = wire.encode(Told(0, bytes(256)))
    assert peers[2].comparison.judge(told | {peers[2].peer_id: other}) is None
    (refused,) = peers[2].seen
    assert refused.peer == peers[0].peer_id.text


def test_a_sketch_of_another_epoch_is_not_counted() -> None:
    peers = [Peer(0), Peer(1), Peer(2)]
    told = gathered(peers)
    peers[2].replica.state.standing = peers[2].replica.standing.by_epoch(1)
    verdict = peers[0].comparison.judge(told | {peers[2].peer_id: peers[2].told})
    assert verdict is not None
    assert len(verdict.distances) == 2


def test_one_that_is_not_finite_knows_it_and_says_a_number() -> None:
    peers = [Peer(0), Peer(1), Peer(2, float("nan"))]
    told = gathered(peers)
    verdict = peers[2].comparison.judge(told)
    assert verdict is not None
    assert peers[2].comparison.is_astray(verdict)
    assert peers[2].comparison.drift == MOST_DRIFT


def test_very_large_states_are_sketched_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmcli.optim.state.comparison.SKETCHED_EACH_EPOCH", 2)
    assert SKETCHED_EACH_EPOCH > 1 << 20
    peer = Peer(0)  # of four elements, so every third epoch
    sketched = []
    for epoch in range(7):
        peer.look()
        if peer.told:
            sketched.append(epoch)
        peer.replica.state.standing = peer.replica.standing.by_epoch(1)
    assert sketched == [0, 3, 6]
