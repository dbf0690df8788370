from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator_web.source import MOST_MEMBERS, GroupMember, LivePeer, LiveStatus
from swarmcli.events import Gone
from swarmcli.journal import EpochRecord, PeerRecord, ReportRecord, RoundRecord, SwarmLoss
from swarmcli.roles.dashboard_rows import (
    departed,
    epoch_rows,
    health,
    listing_order,
    peer_row,
    round_row,
    shares,
    thinned,
)

ALICE, BOB = "a" * 52, "b" * 52
PEER = LivePeer(peer_id=BOB, role="trainer", epoch=7, name="bob", lineage="one")
LIVE = LiveStatus(
    run_id="r", state="training", peer_id=ALICE, role="monitor", epoch=7, samples=1, target=2, lineage="one"
)
EPOCH = EpochRecord(5.0, 3, "one", 4096, 2048, 2, 2.5, 8.0, 0.25)


def report(peer: str, epoch: int, samples: int) -> ReportRecord:
    return ReportRecord(float(epoch), peer, epoch, 2.0, samples, 10.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "in step"),
        ({"epoch": 6, "lineage": "zero"}, "in step"),  # its report is on the way
        ({"epoch": 5}, "behind"),
        ({"lineage": "another"}, "behind"),
        ({"lineage": ""}, "in step"),  # an auxiliary holds none
        ({"epoch": 8}, "in step"),
        ({"answers": False}, "not answering"),
        ({"apart": "another model"}, "another model"),
        ({"apart": "waiting", "answers": False}, "not answering"),
    ],
)
def test_who_is_in_step(changes: dict[str, object], expected: str) -> None:
    assert health(replace(PEER, **changes), LIVE) == expected  # type: ignore[arg-type]


def test_a_peer_says_why_its_last_round_did_not_succeed() -> None:
    assert peer_row(PEER, LIVE, 100.0, None).trouble == ""
    row = peer_row(replace(PEER, round_outcome="failed", round_reason="x"), LIVE, 100.0, 0.5)
    assert (row.trouble, row.share, row.me) == ("its last round was failed: x", 0.5, False)
    assert peer_row(replace(PEER, round_outcome="alone", round_reason="x"), LIVE, 100.0, None).trouble == ""


def test_numbers_that_are_none_stay_out() -> None:
    row = peer_row(replace(PEER, loss=float("nan"), samples_per_second=float("inf")), LIVE, 100.0, None)
    assert (row.loss, row.samples_per_second, row.drift) == (None, 0.0, None)
    assert peer_row(replace(PEER, drift=2e-7), LIVE, 100.0, None).drift == 2e-7


def test_peers_are_listed_in_an_order_that_stays() -> None:
    rows = [
        peer_row(replace(PEER, peer_id=peer_id, role=role, name=name, samples_per_second=rate), LIVE, 0.0, None)
        for peer_id, role, name, rate in [
            ("d", "monitor", "m", 0.0),
            ("c", "trainer", "", 9.0),
            (ALICE, "monitor", "me", 0.0),
            ("b", "auxiliary", "x", 0.0),
            ("a", "trainer", "z", 1.0),
            ("e", "spy", "a", 0.0),
        ]
    ]
    assert [row.peer_id for row in sorted(rows, key=listing_order)] == [ALICE, "a", "c", "b", "d", "e"]


@pytest.mark.parametrize("gone", ["left", "lost"])
def test_who_left_or_was_lost_is_shown_as_it_was(gone: Gone) -> None:
    row = departed(PeerRecord(BOB, "bob", "trainer", True, 5, 10, 3.0, 1.0, 2.0, gone))
    assert (row.health, row.epoch, row.last_seen, row.samples_per_second) == (gone, 5, 2.0, 0.0)


def test_shares_are_what_the_counts_of_samples_grew_by() -> None:
    reports = [report(ALICE, 1, 500), report(BOB, 1, 10_000), report(ALICE, 2, 800), report(BOB, 3, 10_100)]
    assert shares(reports, {}) == {ALICE: 0.75, BOB: 0.25}


def test_before_anyone_reported_twice_rates_decide() -> None:
    assert shares([report(ALICE, 1, 500)], {ALICE: 30.0, BOB: 10.0}) == {ALICE: 0.75, BOB: 0.25}
    assert shares([], {ALICE: 0.0}) == {}
    assert shares([], {ALICE: float("inf")}) == {}


def test_the_loss_of_an_epoch_is_the_swarms_where_it_is_known() -> None:
    rows = epoch_rows([EPOCH, replace(EPOCH, epoch=4)], [SwarmLoss(6.0, 4, 2.25, 2), SwarmLoss(1.0, 2, 3.0, 1)])
    assert [(row.epoch, row.loss, row.own_loss) for row in rows.values()] == [
        (2, 3.0, None),
        (3, 2.5, 2.5),
        (4, 2.25, 2.5),
    ]
    assert (rows[3].samples_per_second, rows[2].samples_per_second, rows[2].seconds) == (512.0, None, None)


def test_an_epoch_that_was_downloaded_has_no_rate() -> None:
    assert epoch_rows([replace(EPOCH, samples=0)], [])[3].samples_per_second is None
    assert epoch_rows([replace(EPOCH, seconds=0.0)], [])[3].samples_per_second is None


def test_a_round_names_whom_it_knows() -> None:
    record = RoundRecord(1.0, "ab", "grads", 3, "failed", "x", ALICE, (ALICE, BOB), (ALICE,), {BOB: "y"}, 1, 2, 0.5)
    row = round_row(record, {ALICE: "alice", BOB: ""})
    assert (row.leader, row.left_out[0].name, row.left_out[0].reason) == ("alice", "b" * 10, "y")
    assert (row.members, row.contributors) == (2, 1)
    assert [(member.name, member.contributed) for member in row.group] == [("alice", True), ("b" * 10, False)]
    crowd = round_row(replace(record, members=tuple("c" * 30)), {})
    assert crowd.group == (GroupMember(name="c", contributed=False),) * MOST_MEMBERS and crowd.members == 30


@given(st.integers(0, 300), st.integers(1, 60))
def test_thinning_keeps_the_bound_the_order_and_the_last(count: int, limit: int) -> None:
    rows = list(epoch_rows([replace(EPOCH, epoch=number) for number in range(count)], []).values())
    kept = thinned(rows, limit)
    assert len(kept) == min(count, limit)
    assert [row.epoch for row in kept] == sorted({row.epoch for row in kept})
    assert not rows or kept[-1] == rows[-1]


def test_an_old_report_of_a_quick_run_does_not_make_a_peer_look_behind() -> None:
    old = replace(PEER, epoch=LIVE.epoch - 4, seen_seconds_ago=2.5)
    assert health(old, LIVE, epoch_seconds=1.0) == "in step"
    assert health(old, LIVE, epoch_seconds=10.0) == "behind"
    assert health(replace(old, epoch=LIVE.epoch - 5), LIVE, epoch_seconds=1.0) == "behind"
