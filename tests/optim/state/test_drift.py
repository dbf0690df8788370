"""Who has drifted is found from what mates report; fewer liars than half make nobody download."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from swarmcli.events import DriftMeasured, Events
from swarmcli.network.identity import PeerID
from swarmcli.optim.state import drift
from swarmcli.optim.state.drift import (
    BUCKETS,
    FURTHEST,
    KEPT,
    SKETCH_BYTES,
    TOLD_BYTES,
    Comparison,
    DriftMonitor,
    compare,
)
from swarmcli.optim.state.replica import InPlace, Replica
from swarmcli.optim.state.training_state import TrainingState
from swarmcli.testing import virtual_time


def peer(number: int) -> PeerID:
    return PeerID(number.to_bytes(32, "big"))


def sketch(*values: float) -> np.ndarray:
    return np.array(values, "<f4")


def compared(*offsets: float, scale: float = 1.0, silent: int = 0) -> Comparison:
    """Compares members whose states lie `offsets` away from the first one's, all in one direction, as fractions of its
    length (`scale`); `silent` more members send no sketch."""
    differences = {
        peer(number): sketch(scale * offset, *[0.0] * (BUCKETS - 1)) for number, offset in enumerate(offsets)
    }
    return compare(differences, scale, len(offsets) + silent, 1e-3)


@pytest.mark.parametrize(
    ("offsets", "strays"),
    [
        ((0.0, 0.0009), []),
        ((0.0, 0.0, 0.002), [2]),
        ((0.0, 0.002, 0.002), [0]),
        ((0.0, 0.0, 0.0, 0.5, 0.9), [3, 4]),
        ((0.0, 0.0008, 0.0016), []),  # the one in the middle is close to both
        ((0.0, 0.004), [1]),  # nobody knows who is right: the smallest id is followed
        ((0.0, 0.002, 0.004), [1, 2]),
        ((0.0, 0.5, 0.0, 0.5), [1, 3]),
        ((math.nan, 0.0), [0]),
        ((math.inf, 0.0, 0.0), [0]),
        ((math.nan, 0.0, 0.5), [0, 2]),
        ((math.nan, math.nan), []),  # nobody has anything to repair it from
    ],
)
def test_a_majority_stays_and_without_one_the_smallest_id_is_followed(offsets: tuple, strays: list) -> None:
    assert compared(*offsets).strays == {peer(number) for number in strays}


@given(
    st.lists(st.sampled_from([0.0, 1e-4, 0.003, 0.5, 1e9, math.nan]), min_size=1, max_size=9), st.floats(1e-20, 1e20)
)
def test_it_depends_on_ratios_and_a_majority_is_never_sent_away(offsets: list, scale: float) -> None:
    found = compared(*offsets)
    assert compared(*offsets, scale=scale).strays == found.strays
    honest = [index for index, offset in enumerate(offsets) if offset in (0.0, 1e-4)]
    if 2 * len(honest) > len(offsets):
        assert found.strays == {peer(index) for index in range(len(offsets)) if index not in honest}


def test_members_that_told_nothing_count_as_not_close() -> None:
    """Otherwise a peer whose mates' reports are late would go by the few that it has read."""
    assert compared(0.0, 0.0, 0.5, silent=1).strays == set()
    assert compared(0.0, 0.0, 0.0, 0.5, silent=1).strays == {peer(3)}
    assert compared(0.0, 0.5, silent=1).strays == set()


class Peer:
    """A monitor of one parameter of four elements, with nothing around it."""

    def __init__(self, number: int, value: float = 1.0) -> None:
        self.peer_id = peer(number)
        self.seen: list[Any] = []
        events = Events()
        events.subscribe(self.seen.append)
        self.parameter = torch.nn.Parameter(torch.ones(4))
        self.replica = Replica(
            TrainingState("run", torch.optim.SGD([self.parameter], lr=1.0)), InPlace([self.parameter])
        )
        self.monitor = DriftMonitor(self.peer_id, events, "run", self.replica, 1e-3)
        with torch.no_grad():
            self.parameter.fill_(value)
        self.look()

    def look(self) -> None:
        virtual_time.run(self.monitor.look())

    def next_epoch(self) -> None:
        """Everybody's parameters move, by far more than what would be drift."""
        with torch.no_grad():
            self.parameter.add_(1.0)
        self.replica.state.position = self.replica.position.by_epoch(1)
        self.look()

    def strays(self, mates: Sequence[Peer], **lies: bytes) -> bool:
        told = {each.peer_id: each.monitor.told for each in mates if each is not self}
        return self.monitor.strays(told | {peer(int(who[1:])): lie for who, lie in lies.items()}, 0)


FAR = sketch(*[1e6] * BUCKETS).tobytes()


def test_all_find_the_same() -> None:
    peers = [Peer(0), Peer(1), Peer(2, 1.5)]
    assert [each.strays(peers) for each in peers] == [False, False, True]
    assert [each.monitor.drift for each in peers] == [0.0, 0.0, pytest.approx(1 / 3)]
    (event,) = [event for event in peers[0].seen if isinstance(event, DriftMeasured)]
    assert event.strays == (peers[2].peer_id.text,)
    peers[0].strays(peers)
    assert peers[0].seen[-1].strays == (), "that is told once"


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("lie", [FAR, b"", b"short", sketch(*[math.nan] * BUCKETS).tobytes()])
def test_one_liar_sends_nobody_away_and_keeps_no_drifter_from_the_others_state(count: int, lie: bytes) -> None:
    honest, drifter = [Peer(number) for number in range(1, count)], Peer(count, 1.5)
    lies = {"p0": honest[0].monitor.told[: TOLD_BYTES - SKETCH_BYTES] + lie}
    assert not any(each.strays(honest, **lies) for each in honest)
    assert drifter.strays([*honest, drifter], **lies)
    assert not any(each.strays([*honest, drifter], **lies) for each in honest)


def test_a_report_of_some_epochs_ago_counts_as_well_and_one_of_another_lineage_does_not() -> None:
    late, drifter, *others = Peer(0), Peer(1, 1.5), Peer(2), Peer(3)
    for each in (drifter, *others):
        each.next_epoch()
    everybody = [late, drifter, *others]
    assert [each.strays(everybody) for each in (drifter, *others)] == [True, False, False]
    elsewhere = {"p0": bytes(TOLD_BYTES)}
    assert not others[0].strays([drifter, others[0]], **elsewhere), "it may be either of them"
    for _ in range(KEPT):
        drifter.next_epoch()
    assert not drifter.strays(everybody), "nothing is left to compare"


def test_one_that_is_not_finite_knows_it_and_says_a_number() -> None:
    peers = [Peer(0), Peer(1), Peer(2, math.nan)]
    assert [each.strays(peers) for each in peers] == [False, False, True]
    assert peers[2].monitor.drift == FURTHEST
    assert not Peer(3, math.nan).strays([]), "with nobody beside it"


def test_very_large_states_are_sketched_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "EACH_EPOCH", 2)
    one, sketched = Peer(0), [0]  # of four elements, so every third epoch
    for epoch in range(1, 7):
        before = one.monitor.told
        one.next_epoch()
        sketched += [epoch] * (one.monitor.told != before)
    assert sketched == [0, 3, 6]
