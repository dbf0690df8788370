from __future__ import annotations

from dataclasses import replace

import pytest

from swarmcli import events as happened
from swarmcli.journal import Line, Recorder
from swarmcli.journal.options import JOURNAL

from .samples import ALICE, BOB, CAROL, averaging_round, epoch, seen

ON_BATTERY = happened.Reason("battery", "on battery")


def of_kind(records: list[object], kind: str) -> list[Line]:
    return [each for each in records if isinstance(each, Line) and each.kind == kind]


def drift(*strays: str) -> happened.DriftMeasured:
    return happened.DriftMeasured(7, 1e-8, {ALICE: 1e-8, BOB: 0.25}, strays)


def test_an_epoch_becomes_a_row_and_a_round_a_line_as_well_where_it_was_unusual() -> None:
    assert list(Recorder().kept(epoch(3), 50.0)) == [replace(epoch(3), time=50.0)]
    record, line = Recorder().kept(averaging_round(3), 50.0)
    assert record == replace(averaging_round(3), time=50.0) and isinstance(line, Line)
    assert line.text == "round at epoch 3 went on without cccccccccc (no part arrived for 4.0 s)"
    _, line = Recorder().kept(averaging_round(3, "failed", "bob was killed"), 50.0)
    assert isinstance(line, Line)
    assert (line.level, line.text) == ("warning", "round at epoch 3 failed: bob was killed")


@pytest.mark.parametrize(
    "event",
    [
        happened.PeerDisconnected(BOB, "closed by peer: \x1b]0;owned\x07\nall is well" + "x" * 9000),
        happened.PeerRefused(BOB, "\x9b2J\u202e" + "x" * 9000),
        happened.PeerSilent(BOB, "\x1b[2Jbob", "trainer"),
        averaging_round(3, "failed", "\x1b[2J"),
    ],
)
def test_lines_carry_nothing_of_a_stranger_that_steers_a_terminal(event: happened.Event) -> None:
    *_, line = Recorder().kept(event, 50.0)
    assert isinstance(line, Line) and line.text.isprintable() and len(line.text) <= 2000


def test_a_peer_joins_and_leaves_once_however_often_it_is_seen() -> None:
    recorder = Recorder()
    sightings = [seen(), seen(epoch=2), seen(epoch=3, gone="left"), seen(epoch=3)]
    records = [record for now, event in enumerate(sightings) for record in recorder.kept(event, float(now))]
    peers = [record for record in records if isinstance(record, happened.PeerSeen)]
    assert [peer.first_seen for peer in peers] == [0.0, 0.0, 0.0, 3.0]
    assert [peer.gone for peer in peers] == ["", "", "left", ""]
    said = [line.text for line in records if isinstance(line, Line)]
    assert said == ["trainer bob joined", "trainer bob left", "trainer bob joined"]
    never_here = list(Recorder().kept(seen(gone="left"), 1.0))
    assert [type(record) for record in never_here] == [happened.PeerSeen]
    assert list(Recorder().kept(drift(), 50.0)) == [], "it is news where something is done about it"


def test_strangers_do_not_decide_how_long_the_journal_gets() -> None:
    recorder = Recorder()
    knocks = [happened.PeerRefused(f"{i:052}", "wrong version") for i in range(1000)]
    written = [record for event in knocks for record in recorder.kept(event, 100.0)]
    assert len(written) == JOURNAL.burst
    later = list(recorder.kept(knocks[0], 110.0))
    assert [line.text for line in of_kind(later, "suppressed")] == ["940 lines about connections left out"]
    assert len(of_kind(later, "refused")) == 1


def test_throwaway_identities_that_come_report_and_go_fill_no_disk_and_no_memory() -> None:
    """As five hundred of them every three seconds, under the key of the run's peers."""
    recorder, kept = Recorder(), 0
    for second in range(0, 300, 3):
        for number in range(500):
            peer = f"{second} {number}"
            for event in (
                happened.PeerSeen(peer, "x", "trainer", 1, 1, 1.0, False),
                happened.EpochReported(peer, second, 1.0, 1, 1.0),
                happened.PeerSeen(peer, "x", "trainer", 1, 1, 1.0, False, gone="lost"),
            ):
                kept += len(list(recorder.kept(event, float(second))))
    # A sighting and an end: two rows with a line each.
    assert kept <= 4 * (JOURNAL.report_burst + 300 * JOURNAL.reports_per_second)
    assert len(recorder._names) <= JOURNAL.names and not recorder._first_seen


def test_a_clock_that_jumps_back_does_not_open_the_gate() -> None:
    recorder = Recorder()
    for now in (100.0, 50.0, 100.0, 50.0):
        for i in range(100):
            list(recorder.kept(happened.PeerRefused(f"{i:052}", "no"), now))
    assert len(list(recorder.kept(happened.PeerRefused(BOB, "no"), 50.0))) == 0


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            happened.PeerRefused(BOB, "it differs in seed", "recipe"),
            ("warning", "refused recipe of bbbbbbbbbb: it differs in seed"),
        ),
        (
            happened.StateDownloaded(7, "ab", (BOB,), 12_400_000, 1.5, "two epochs were missed"),
            (
                "info",
                "downloaded the state of epoch 7 from bbbbbbbbbb (12 MB in 1.5 s), because two epochs were missed",
            ),
        ),
        (
            happened.RoundsReplayed(7, "aa", 2, "another lineage leads"),
            ("info", "caught up to epoch 7 by 2 rounds that it had missed, because another lineage leads"),
        ),
        (happened.StateDonated(BOB, 7, 950), ("info", "gave the state of epoch 7 to bbbbbbbbbb (950 B)")),
        (
            happened.WayChanged(BOB, "relay://x/y", relayed=True),
            ("detail", "the connection to bbbbbbbbbb is over a relay now, at relay://x/y"),
        ),
        (
            drift(BOB),
            ("warning", "the parameters of bbbbbbbbbb have drifted away (2.5e-01): downloading the state repairs them"),
        ),
        (
            happened.PeerRefused(
                ALICE, "the owner of this run has revoked the invitation; ask the owner", "membership"
            ),
            ("info", "aaaaaaaaaa is no member any more: the owner of this run has revoked the invitation"),
        ),
        (
            happened.ActivityStatus("paused", (happened.Reason("battery", "on battery"),)),
            ("info", "paused: on battery"),
        ),
        (happened.ActivityStatus(), ("info", "works again")),
    ],
)
def test_events_read_like_sentences(event: happened.Event, line: tuple[str, str]) -> None:
    (record,) = Recorder().kept(event, 1.0)
    assert isinstance(record, Line)
    assert (record.level, record.text) == line


def test_a_round_takes_as_long_as_it_ran_and_not_as_its_group_stood() -> None:
    ended = replace(averaging_round(3), seconds={"looking for group": 2.0, "running all-reduce": 0.5})
    assert ended.duration == pytest.approx(0.5)
    in_vain = replace(ended, round_id="", seconds={"looking for group": 2.0})
    assert in_vain.duration == pytest.approx(2.0)


def test_a_line_has_names_where_they_are_known_and_ids_beside_them_where_one_could_be_taken_for_another() -> None:
    recorder = Recorder()

    def told(event: happened.Event) -> str:
        *_, line = recorder.kept(event, 2.0)
        assert isinstance(line, Line)
        return line.text

    gave, failed = happened.StateDonated(BOB, 7, 10), averaging_round(3, "failed", f"reducer {BOB[:10]} fell silent")
    assert told(gave) == f"gave the state of epoch 7 to {BOB[:10]} (10 B)"
    list(recorder.kept(replace(seen(BOB), name="Bob"), 1.0))
    assert told(gave) == "gave the state of epoch 7 to Bob (10 B)"
    assert told(failed) == f"round at epoch 3 failed: reducer Bob ({BOB[:10]}) fell silent"
    list(recorder.kept(replace(seen(CAROL), name="Bob"), 1.0))
    assert told(gave) == f"gave the state of epoch 7 to Bob ({BOB[:10]}) (10 B)"


def test_samples_that_are_lost_in_many_pieces_are_told_in_one_sum() -> None:
    recorder = Recorder()
    lost = happened.Noticed("warning", "16 samples of this peer are lost: they are of parameters that the run has left")
    assert [line for now in range(6) for line in recorder.kept(lost, float(now))] == []
    (line,) = recorder.kept(lost, 12.0)
    assert (line.level, line.time) == ("warning", 0.0) and line.text == f"96{lost.text[2:]}"
    assert [line.text for line in recorder.losses()] == [lost.text]
