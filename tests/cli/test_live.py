"""What stands before a person while a peer runs: on terminals of any size, and line by line in a pipe."""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from swarmcli.cli.live import BARS, Frame, LiveView, sparkline
from swarmcli.events import ActivityStatus, EpochAdvanced, Events, Noticed, PeerConnected, PeerSeen, Reason
from swarmcli.journal import Line, Totals
from swarmcli.run.values import Me, PeerStatus, RunStatus

ALICE, BOB = "a" * 52, "b" * 52
PEERS = (
    PeerStatus(peer_id=ALICE, role="trainer", epoch=7, name="alice", samples_per_second=300.0, loss=2.0, me=True),
    PeerStatus(peer_id=BOB, role="trainer", epoch=4, name="bob", samples_per_second=100.0, loss=4.0, last_seen=-7.0),
    PeerStatus(peer_id="c" * 52, role="auxiliary", epoch=7),
)
STATUS = RunStatus(
    run_id="stdlib-lm", state="training", peer_id=ALICE, role="trainer", name="alice", epoch=7, samples=1024,
    target=4096, samples_per_second=400.0, eta_seconds=3.0, max_epochs=20, peers=PEERS,
)  # fmt: skip
ME = Me(
    sentence="Training at 300 samples a second, epoch 7 of 20", share=0.75, samples=12_400, hours=3.1, rank=3,
    ranked=7, totals=Totals(rounds_committed=41),
)  # fmt: skip
MANY = tuple(replace(PEERS[1], peer_id=f"{number:052}") for number in range(100))


def epoch(number: int, loss: float | None = 2.5) -> EpochAdvanced:
    return EpochAdvanced(number, "ab" * 32, 4096, 2048, 2, loss, 8.0, 0.25)


def news(text: str) -> Line:
    return Line("info", "notice", "", text)


def console(width: int = 110, *, height: int = 40, terminal: bool = False) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=width, height=height, highlight=False, markup=False), file


def drawn(status: RunStatus, *more: Any, width: int = 110, height: int = 40) -> str:
    where, file = console(width, height=height)
    where.print(Frame(status, *more))
    return file.getvalue()


def lines_of(status: RunStatus, *more: Any, **size: int) -> list[str]:
    return [line.rstrip() for line in drawn(status, *more, **size).splitlines()]


def shown(*happened: Any, width: int = 110, terminal: bool = False, **options: Any) -> str:
    """What a view shows of these events."""
    where, file = console(width, terminal=terminal)
    events = Events()
    with LiveView(lambda: STATUS, events, console=where, clock=lambda: 0.0, **options):
        for each in happened:
            events.emit(each)
    return file.getvalue()


def test_a_frame_shows_progress_figures_and_peers() -> None:
    text = drawn(replace(STATUS, last_epoch=epoch(7), losses=(4.0, 3.0, 2.0)))
    for expected in (
        "stdlib-lm  trainer alice  training", "epoch 7 of 20", "1,024 of 4,096 samples", "3 s to the next epoch",
        "loss 2.0000  █▅▁",
        "400.0 samples/s", "last epoch 8.0 s, 0.2 s of it averaging",
    ):  # fmt: skip
        assert expected in text
    assert [line.split() for line in text.splitlines()[-3:]] == [
        ["alice", "trainer", "7", "300.0", "2.000", "now"],
        ["bob", "trainer", "4", "100.0", "4.000", "7.0", "s", "ago"],
        ["cccccccccc", "auxiliary", "7", "–", "–", "now"],
    ]
    assert sparkline([1.0, 8.0]) == BARS[0] + BARS[-1] and sparkline([3.0, 3.0]) == BARS[0] * 2


@pytest.mark.parametrize(
    "more",
    [
        {"run_eta_seconds": 5400.0, "said": "3 s to the next epoch, about 90 min to the last"},
        {"reach": "others cannot dial this peer: its router or firewall lets nobody in"},
        {"evaluated": "epoch 5: loss 2.0", "said": "model epoch 5: loss 2.0"},
        {"alarm": "Two models are being trained: one by alice (epoch 7), another by bob (epoch 4)."},
    ],
)
def test_a_frame_tells_what_else_is_known(more: dict[str, Any]) -> None:
    said = more.pop("said", None) or next(iter(more.values()))
    assert said in drawn(replace(STATUS, **more)) and said not in drawn(STATUS)
    where, file = console(terminal=True)
    where.print(Frame(replace(STATUS, **more)))
    assert ("\x1b[1;31mTwo models" in file.getvalue()) is ("alarm" in more), "what a person has to mend is red"


def test_a_frame_tells_how_far_peers_are_from_each_other() -> None:
    peers = (replace(PEERS[0], drift=0.0), replace(PEERS[1], drift=3.2e-7), PEERS[2])
    lines = lines_of(replace(STATUS, peers=peers))
    column = next(line for line in lines if "drift" in line).index("drift")
    assert [line[column : column + 6].strip() for line in lines[-3:]] == ["0", "3e-07", "–"]


def test_who_does_not_answer_or_trains_another_model_is_named() -> None:
    peers = (
        PEERS[0],
        replace(PEERS[1], health="not answering", last_seen=-12.0),
        replace(PEERS[1], peer_id="d" * 52, name="dora", health="another model", last_seen=-1.0),
        replace(PEERS[1], peer_id="e" * 52, name="eve", health="waiting", last_seen=-1.0),
    )
    lines = lines_of(replace(STATUS, peers=peers))
    for name, health in (("bob", "not answering, 12 s"), ("dora", "another model"), ("eve", "waiting")):
        assert next(line for line in lines if line.startswith(name)).endswith(health)


def test_a_frame_tells_what_this_peer_has_given() -> None:
    lines = lines_of(STATUS, ME)
    assert "mine 75% of the last epochs   12,400 in all   41 rounds   3.1 h   place 3 of 7" in lines
    assert "place 3 of 7 as one peer counts" in drawn(STATUS, replace(ME, told_by="as one peer counts"))
    helps = replace(ME, share=None, rank=None, totals=Totals(bytes_sent=3_000_000))
    text = drawn(replace(STATUS, role="auxiliary"), helps)
    assert "sent to others" in text and "place" not in text
    activity = ActivityStatus(state="paused", reasons=(Reason(kind="battery", text="on battery"),))
    first = lines_of(STATUS, replace(ME, activity=activity, sentence="Paused: on battery"))[0]
    assert "Paused: on battery" in first and "training" not in first
    raw = io.BytesIO()
    ascii_alone = io.TextIOWrapper(raw, encoding="ascii", errors="replace")  # as the command sets its streams
    Console(file=ascii_alone, width=60, height=30, no_color=True).print(Frame(replace(STATUS, losses=(1.0, 2.0)), ME))
    ascii_alone.flush()
    assert b"loss 2.0000   400.0 samples/s" in raw.getvalue()  # without the curve


SEAT = (
    "a round sends 1.8 MB; your limit of 10 kB/s needs 3 min, epochs take 4 s: your samples cannot count here; "
    "this computer follows the run and computes nothing; a higher limit brings it back"
)
FOLLOWING = replace(
    STATUS, state="following", seat=SEAT, samples_per_second=100.0,
    peers=(replace(PEERS[0], health="line too slow", samples_per_second=0.0), replace(PEERS[1], epoch=7)),
)  # fmt: skip
WAITS = "The run stands still: epoch 7 has lasted 30 s, and one usually takes about 10 s. It waits for bob (is behind)."
STANDING = replace(
    STATUS, state="standing", waits=WAITS, samples_per_second=0.0, eta_seconds=None,
    peers=(PEERS[0], replace(PEERS[1], health="not answering")),
)  # fmt: skip
GETTING = replace(
    STATUS, state="synchronizing", epoch=0, samples=0, eta_seconds=None,
    download="downloading the state: 1.2 MB of 5.3 MB at 10 kB/s, about 7 min left",
    peers=(replace(PEERS[0], epoch=0, health="catching up"), replace(PEERS[1], epoch=7)),
)  # fmt: skip
FINISHED = replace(STATUS, state="finished", epoch=20, samples=0, eta_seconds=None, result="saved epoch 20 at runs/x")


def test_a_trainer_without_a_seat_is_told_so_as_long_as_that_lasts() -> None:
    lines = lines_of(FOLLOWING, width=60)
    text = " ".join(" ".join(lines).split())
    assert SEAT[0].upper() + SEAT[1:] in text and "training" not in text and "computing nothing" in lines[0]
    mine = next(line for line in lines if line.startswith("alice"))
    assert mine.split()[3:] == ["–", "–", "line", "too", "slow"], "neither a rate nor a loss"


def test_what_a_frame_tells_of_a_run_that_stands_of_a_state_that_comes_and_of_the_end() -> None:
    lines = lines_of(STANDING)
    assert WAITS in lines and "the run stands still" in lines[0] and "training" not in lines[0]
    assert not any(" left" in line for line in lines) and "samples/s" not in lines[2]
    lines = lines_of(GETTING)
    assert lines[1] == GETTING.download and "0 of 4,096" not in "".join(lines) and "samples/s" not in lines[2]
    assert next(line for line in lines if line.startswith("alice")).endswith("catching up")
    lines = lines_of(replace(FINISHED, losses=(3.0, 2.0)))
    assert "finished" in lines[0] and lines[1] == "epoch 20  saved epoch 20 at runs/x"
    assert "sample" not in lines[1] + lines[2] and "loss 2.0000" in lines[2]


def test_a_peer_that_pauses_before_it_has_joined_does_not_look_for_its_run() -> None:
    looks = replace(GETTING, download="")
    assert lines_of(looks)[:2] == [lines_of(looks)[0], "looking for it"] and "joining the run" in lines_of(looks)[0]
    assert "catching up with the run" in lines_of(GETTING)[0]
    pauses = replace(ME, activity=ActivityStatus(state="paused"), sentence="Paused: on battery")
    assert lines_of(looks, pauses)[1] == "epoch 0 of 20"


def test_names_cannot_steer_the_terminal() -> None:
    hostile = (replace(PEERS[0], name="\x1b]0;x\x07\n\u202eevil"),)
    text = drawn(replace(STATUS, name="\x1b[2J", run_id="[bold]x\x07", peers=hostile))
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "[bold]x" in text and "]0;x evil" in text


# ---- in a pipe


def test_in_a_pipe_each_thing_is_a_line() -> None:
    text = shown(
        PeerSeen(BOB, "bob", "trainer", 1, 2, 3.0, False),
        PeerSeen(BOB, "bob", "trainer", 2, 2, 3.0, False),
        PeerConnected(BOB, "tcp://h:1"),
        epoch(8),
        Noticed("warning", "the journal cannot be written"),
    )
    assert [line[10:] for line in text.splitlines()] == [
        "trainer bob joined",
        "epoch 8  loss 2.5000  4,096 samples of 2 peers  8.0 s, 0.2 s of it averaging",
        "warning: the journal cannot be written",
    ]


class Watched(io.StringIO):
    """Does as it is told with each text that is written."""

    def __init__(self, hear: Callable[[str], object]) -> None:
        super().__init__()
        self._hear = hear

    def write(self, text: str) -> int:
        self._hear(text)
        return super().write(text)


@pytest.mark.parametrize(
    ("status", "said", "unsaid"),
    [
        (STATUS, "epoch 7: 1,024 of 4,096 samples, about 3 s to the next epoch, 400.0 per second", "warning"),
        (FOLLOWING, f"warning: {SEAT}", "400"),
        (STANDING, f"warning: {WAITS}", "left"),
        (GETTING, GETTING.download, "of 4,096"),
        (replace(STATUS, state="waiting", eta_seconds=None), "waiting for trainers", "per second"),
    ],
)
def test_in_a_pipe_progress_and_trouble_are_told_now_and_then(
    status: RunStatus, said: str, unsaid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmcli.cli.live.PROGRESS", 0.02)
    written = threading.Event()
    file = Watched(lambda text: said in text and written.set())
    ticks = itertools.count(0, 60)
    where = Console(file=file, width=300, highlight=False, markup=False)
    with LiveView(lambda: status, Events(), console=where, clock=lambda: float(next(ticks))):
        assert written.wait(30)
    assert unsaid not in file.getvalue()


def test_of_a_run_that_has_finished_no_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmcli.cli.live.PROGRESS", 0.02)
    looks, ticks = threading.Semaphore(0), itertools.count(0, 60)

    def status() -> RunStatus:
        looks.release()
        return FINISHED

    where, file = console()
    with LiveView(status, Events(), console=where, clock=lambda: float(next(ticks))):
        for _ in range(3):
            assert looks.acquire(timeout=30)
    assert file.getvalue() == ""


def test_a_terminal_that_takes_nothing_does_not_hold_up_who_emits() -> None:
    """Ctrl-S, or a pager that waits: the training goes on."""
    stuck, released = threading.Event(), threading.Event()
    file = Watched(lambda text: (stuck.set(), released.wait(30)))
    events = Events()
    where = Console(file=file, width=110, highlight=False, markup=False)
    with LiveView(lambda: STATUS, events, console=where, clock=lambda: 0.0):
        events.emit(epoch(0))
        assert stuck.wait(30)
        for number in range(1, 2000):
            events.emit(epoch(number))
        released.set()
    lines = file.getvalue().splitlines()
    assert len(lines) <= 1002 and lines[-1][10:].startswith("epoch 1999 ")


# ---- on a terminal


def test_on_a_terminal_the_view_is_redrawn_and_warnings_stay_above_the_latest_events() -> None:
    text = shown(
        epoch(8), *(Noticed("info", f"news {n}") for n in range(9)), Noticed("warning", "the disk is full"),
        terminal=True,
    )  # fmt: skip
    last = text.split("warning: the disk is full")[-1]
    assert "epoch 7 of 20" in last and [f"news {n}" in last for n in range(9)] == [False] * 3 + [True] * 6
    assert "4,096 samples of 2 peers" not in text  # epochs show in the view, not line by line


@pytest.mark.parametrize(("plain", "term"), [(True, "xterm"), (False, "dumb"), (False, "xterm")])
def test_plain_and_dumb_terminals_get_lines_and_what_the_session_says_is_shown_until_the_block_ends(
    plain: bool, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    where, file = console(terminal=True)
    events = Events()
    before = set(threading.enumerate())  # one of an earlier test may be about to end
    with LiveView(lambda: STATUS, events, console=where, plain=plain, clock=lambda: 0.0) as view:
        assert len(set(threading.enumerate()) - before) >= 1
        events.emit(epoch(8))
        view.say("Ctrl-C again leaves at once")
    assert set(threading.enumerate()) <= before
    text = file.getvalue()
    events.emit(Noticed("warning", "too late"))
    assert file.getvalue() == text and "Ctrl-C again leaves at once" in text
    in_lines = plain or term == "dumb"
    assert ("4,096 samples of 2 peers" in text) is in_lines and ("epoch 7 of 20" in text) is not in_lines


def test_of_many_peers_as_many_are_shown_as_fit_and_the_others_counted() -> None:
    text = drawn(replace(STATUS, peers=MANY))
    assert text.count("bob") == 12 and "and 88 more" in text
    lines = lines_of(replace(STATUS, peers=MANY), ME, [news("news")] * 4, width=80, height=20)
    assert len(lines) < 20 and "and 93 more" in "".join(lines) and lines[-1].endswith("news")


@pytest.mark.parametrize("width", [30, 60])
def test_a_frame_keeps_its_height_and_its_width_however_many_epochs_and_events_there_were(width: int) -> None:
    frames = []
    for epochs in (0, 1, 20, 60):
        losses = tuple(float(number) for number in range(epochs))
        frames.append(lines_of(replace(STATUS, epoch=17, last_epoch=epoch(7), losses=losses), width=width))
    assert {len(lines) for lines in frames} == {8}  # four of the head, a heading, and three peers
    assert max(len(line) for lines in frames for line in lines) <= width
    said = [news("news " * (20 if number % 2 else 1)) for number in range(5)]
    assert len({len(lines_of(STATUS, None, said[:count], width=60, height=20)) for count in (1, 2, 3, 4, 5)}) == 1


def test_sixty_columns_are_filled_with_what_fits_whole_and_forty_do_without_some() -> None:
    status = replace(STATUS, run_eta_seconds=2820.0, last_epoch=replace(epoch(7), seconds=70.0, averaging_seconds=0.5))
    lines = lines_of(status, replace(ME, samples=1_031_168), width=60, height=20)
    assert "…" not in "".join(lines)
    assert lines[1].startswith("epoch 7 of 20 ") and lines[1].endswith(" 1,024 of 4,096 samples 3 s to the next epoch")
    assert lines[2] == "loss –   400.0 samples/s   last epoch 70 s"
    assert lines[3] == "mine 75% of the last epochs   1,031,168 in all   41 rounds"
    table = lines_of(STATUS, width=40)[4:]
    assert table[0].split() == ["peer", "epoch", "samples/s", "loss"]
    assert table[1].split() == ["alice", "7", "300.0", "2.000"] and "…" not in "".join(table)


def test_a_long_event_is_wrapped_between_words_on_a_terminal_and_not_at_all_in_a_pipe() -> None:
    for terminal in (True, False):
        text = shown(Noticed("warning", " ".join(["something"] * 20)), width=40, terminal=terminal)
        told = [line for line in text.splitlines() if "something" in line]
        assert sum(line.count("something") for line in told) == 20
        assert (len(told) > 1) is terminal


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("saved at /runs/x", ["saved at /runs/x"]),
        ("news " * 40, ["news " * 8 + "news", "news " * 9 + "ne…"]),  # room for what a terminal echoes
    ],
)
def test_at_sixty_columns_an_event_is_told_in_whole_words_on_two_lines(text: str, told: list[str]) -> None:
    lines = lines_of(STATUS, None, [news("news"), news(text)], width=60, height=20)
    assert [line[10:] for line in lines[-len(told) :]] == told
    assert lines[-len(told) - 1].endswith("  news") and lines[-len(told)][:10].strip().count(":") == 2
