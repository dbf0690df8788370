from __future__ import annotations

import io
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from swarmcli.cli.live import BARS, Frame, LiveView, ViewOptions, sparkline
from swarmcli.events import EpochAdvanced, Events, Noticed, PeerConnected, PeerSeen
from swarmcli.journal import Line, Totals
from swarmcli.run.values import ActivityShown, Me, PeerStatus, Reason, RunStatus

ALICE, BOB = "a" * 52, "b" * 52
PEERS = (
    PeerStatus(peer_id=ALICE, role="trainer", epoch=7, name="alice", samples_per_second=300.0, loss=2.0, me=True),
    PeerStatus(peer_id=BOB, role="trainer", epoch=4, name="bob", samples_per_second=100.0, loss=4.0, last_seen=-7.0),
    PeerStatus(peer_id="c" * 52, role="auxiliary", epoch=7),
)
STATUS = RunStatus(
    run_id="stdlib-lm",
    state="training",
    peer_id=ALICE,
    role="trainer",
    name="alice",
    epoch=7,
    samples=1024,
    target=4096,
    samples_per_second=400.0,
    eta_seconds=3.0,
    max_epochs=20,
    peers=PEERS,
)


def epoch(number: int, loss: float | None = 2.5) -> EpochAdvanced:
    return EpochAdvanced(number, "ab" * 32, 4096, 2048, 2, loss, 8.0, 0.25)


def news(text: str) -> Line:
    return Line("info", "notice", "", text)


def console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=110, height=40, highlight=False, markup=False), file


def drawn(frame: Frame) -> str:
    where, file = console()
    where.print(frame)
    return file.getvalue()


def test_a_frame_tells_the_mode_and_how_far_peers_are_from_each_other() -> None:
    peers = (replace(PEERS[0], drift=0.0), replace(PEERS[1], drift=3.2e-7), PEERS[2])
    lines = drawn(Frame(replace(STATUS, mode="local updates", peers=peers))).splitlines()
    assert "local updates" in lines[0]
    column = next(line for line in lines if "drift" in line).index("drift")
    assert [line[column : column + 6].strip() for line in lines[-3:]] == ["0", "3e-07", "–"]


def test_a_frame_tells_when_the_run_will_have_ended() -> None:
    lines = drawn(Frame(replace(STATUS, run_eta_seconds=5400.0)))
    assert "3 s left, about 90 min to the last epoch" in lines


def test_a_frame_says_who_can_dial_this_peer() -> None:
    text = "others cannot dial this peer: its router or firewall lets nobody in; it takes part through 2 relays"
    assert text in drawn(Frame(replace(STATUS, reach=text))).splitlines()


def test_a_frame_says_in_one_red_line_what_a_person_has_to_mend() -> None:
    where, file = console(terminal=True)
    text = "Two models are being trained: one by alice (epoch 7), another by bob (epoch 4)."
    where.print(Frame(replace(STATUS, alarm=text)))
    assert f"\x1b[1;31m{text}" in file.getvalue()
    assert "Two models" not in drawn(Frame(STATUS))


def test_who_does_not_answer_or_trains_another_model_is_named_and_not_counted() -> None:
    peers = (
        PEERS[0],
        replace(PEERS[1], health="not answering", last_seen=-12.0),
        replace(PEERS[1], peer_id="d" * 52, name="dora", health="another model", last_seen=-1.0),
        replace(PEERS[1], peer_id="e" * 52, name="eve", health="waiting", last_seen=-1.0),
    )
    lines = drawn(Frame(replace(STATUS, peers=peers))).splitlines()
    rows = {name: next(line for line in lines if line.startswith(name)) for name in ("bob", "dora", "eve")}
    assert rows["bob"].rstrip().endswith("not answering, 12 s")
    assert rows["dora"].rstrip().endswith("another model") and rows["eve"].rstrip().endswith("waiting")


def test_of_a_state_that_was_taken_over_no_length_is_told() -> None:
    where, file = console()
    events = Events()
    with LiveView(lambda: STATUS, events, console=where, clock=lambda: 0.0):
        events.emit(EpochAdvanced(41, "ab" * 32, 0, 0, 0, None, 61.0, 0.0))
    assert file.getvalue().splitlines()[0][10:] == "epoch 41  taken over from another peer"


# ---- without a terminal


def test_in_a_pipe_each_thing_is_a_line() -> None:
    where, file = console()
    events = Events()
    with LiveView(lambda: STATUS, events, console=where, clock=lambda: 0.0):
        events.emit(PeerSeen(BOB, "bob", "trainer", 1, 2, 3.0, False))
        events.emit(PeerSeen(BOB, "bob", "trainer", 2, 2, 3.0, False))
        events.emit(PeerConnected(BOB, "tcp://h:1"))
        events.emit(epoch(8))
        events.emit(Noticed("warning", "the journal cannot be written"))
    lines = [line[10:] for line in file.getvalue().splitlines()]
    assert lines == [
        "trainer bob joined",
        "epoch 8  loss 2.5000  4,096 samples of 2 peers  8.0 s, 0.2 s of it averaging",
        "warning: the journal cannot be written",
    ]


def test_nothing_is_heard_and_no_thread_is_left_after_the_block() -> None:
    where, file = console()
    events = Events()
    before = set(threading.enumerate())  # one of an earlier test may be about to end
    with LiveView(lambda: STATUS, events, console=where, clock=lambda: 0.0):
        assert len(set(threading.enumerate()) - before) == 1
    assert set(threading.enumerate()) <= before
    events.emit(epoch(8))
    assert file.getvalue() == ""


def test_a_long_epoch_shows_some_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmcli.cli.live.VIEW", ViewOptions(progress=0.02))
    written = threading.Event()

    class Watched(io.StringIO):
        def write(self, text: str) -> int:
            if "per second" in text:
                written.set()
            return super().write(text)

    ticks = iter(range(0, 1_000_000, 60))
    file = Watched()
    where = Console(file=file, width=110, highlight=False, markup=False)
    with LiveView(lambda: STATUS, Events(), console=where, clock=lambda: float(next(ticks))):
        assert written.wait(30)
    assert "epoch 7: 1,024 of 4,096 samples, about 3 s left, 400.0 per second" in file.getvalue()


def test_a_terminal_that_takes_nothing_does_not_hold_up_who_emits() -> None:
    """Ctrl-S, or a pager that waits: the training goes on."""
    stuck, released = threading.Event(), threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            stuck.set()
            released.wait(30)
            return super().write(text)

    file = Stuck()
    events = Events()
    where = Console(file=file, width=110, highlight=False, markup=False)
    with LiveView(lambda: STATUS, events, console=where, clock=lambda: 0.0):
        events.emit(epoch(0))
        assert stuck.wait(30)
        for number in range(1, 5000):
            events.emit(epoch(number))
        released.set()
    lines = file.getvalue().splitlines()
    assert len(lines) <= 1002 and lines[-1][10:].startswith("epoch 4999 ")


SEAT = (
    "a round sends 1.8 MB; your limit of 10 kB/s needs 3 min, epochs take 4 s: your samples cannot count here; "
    "this computer follows the run and computes nothing; a higher limit brings it back"
)
FOLLOWING = replace(
    STATUS, state="following", seat=SEAT, samples_per_second=100.0,
    peers=(replace(PEERS[0], health="follows", samples_per_second=0.0), replace(PEERS[1], epoch=7)),
)  # fmt: skip
WAITS = "The run stands: epoch 7 has lasted 30 s, where one takes about 10 s. It waits for bob (does not answer)."
STANDING = replace(
    STATUS, state="standing", waits=WAITS, samples_per_second=0.0, eta_seconds=None,
    peers=(PEERS[0], replace(PEERS[1], health="not answering")),
)  # fmt: skip
GETTING = replace(
    STATUS, state="synchronizing", epoch=0, samples=0, eta_seconds=None,
    download="downloading the state: 1.2 MB of 5.3 MB at 10 kB/s, about 7 min left",
    peers=(replace(PEERS[0], epoch=0, health="catching up"), replace(PEERS[1], epoch=7)),
)  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 110])
def test_a_trainer_without_a_seat_is_told_so_as_long_as_that_lasts(width: int) -> None:
    where, file = console()
    where.width = width
    where.print(Frame(FOLLOWING))
    text = file.getvalue()
    assert SEAT[0].upper() + SEAT[1:] in " ".join(text.split()) and "training" not in text
    assert "computing nothing" in text.splitlines()[0]
    mine = next(line for line in text.splitlines() if line.startswith("alice"))
    assert mine.split()[3:] == ["–", "–", "link", "too", "slow"], "neither a rate nor a loss"


def test_of_a_run_that_stands_no_rate_and_no_end_is_told_but_whom_it_waits_for() -> None:
    text = drawn(Frame(STANDING))
    assert WAITS in text and "the run stands" in text.splitlines()[0]
    assert not {"training", "left", "samples/s  "} & set(text.splitlines()[0].split())
    assert " left" not in text and "samples/s" not in text.splitlines()[2]


def test_a_state_that_comes_is_told_in_place_of_the_progress_of_an_epoch() -> None:
    lines = drawn(Frame(GETTING)).splitlines()
    assert lines[1] == GETTING.download and "0 of 4,096" not in "".join(lines)
    assert "samples/s" not in lines[2]
    mine = next(line for line in lines if line.startswith("alice"))
    assert mine.rstrip().endswith("catching up")


@pytest.mark.parametrize(
    ("status", "said", "unsaid"),
    [
        (FOLLOWING, f"warning: {SEAT}", "400"),
        (STANDING, f"warning: {WAITS}", "left"),
        (GETTING, GETTING.download, "of 4,096"),
        (replace(STATUS, state="waiting", eta_seconds=None), "waiting for trainers", "per second"),
    ],
)
def test_in_a_pipe_trouble_is_told_while_it_lasts(
    status: RunStatus, said: str, unsaid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmcli.cli.live.VIEW", ViewOptions(progress=0.02))
    written = threading.Event()

    class Watched(io.StringIO):
        def write(self, text: str) -> int:
            if said in text:
                written.set()
            return super().write(text)

    ticks = iter(range(0, 1_000_000, 60))
    file = Watched()
    where = Console(file=file, width=300, highlight=False, markup=False)
    with LiveView(lambda: status, Events(), console=where, clock=lambda: float(next(ticks))):
        assert written.wait(30)
    assert unsaid not in file.getvalue()


FINISHED = replace(STATUS, state="finished", epoch=20, samples=0, eta_seconds=None, result="saved epoch 20 at runs/x")


def test_of_a_run_that_has_finished_no_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmcli.cli.live.VIEW", ViewOptions(progress=0.02))
    looks = threading.Semaphore(0)

    def status() -> RunStatus:
        looks.release()
        return FINISHED

    ticks = iter(range(0, 1_000_000, 60))
    where, file = console()
    with LiveView(status, Events(), console=where, clock=lambda: float(next(ticks))):
        for _ in range(3):
            assert looks.acquire(timeout=30)
    assert file.getvalue() == ""


# ---- on a terminal


def test_the_frame_of_a_run_that_has_finished_says_where_its_model_is() -> None:
    lines = drawn(Frame(replace(FINISHED, losses=(3.0, 2.0)))).splitlines()
    assert "finished" in lines[0]
    assert lines[1] == "epoch 20  saved epoch 20 at runs/x"
    assert "sample" not in lines[1] + lines[2] and "loss 2.0000" in lines[2]


def test_on_a_terminal_the_view_is_redrawn_and_warnings_stay_above_it() -> None:
    where, file = console(terminal=True)
    events = Events()
    with LiveView(lambda: STATUS, events, console=where, clock=lambda: 0.0):
        events.emit(epoch(8))
        events.emit(Noticed("warning", "the disk is full"))
    text = file.getvalue()
    assert "warning: the disk is full" in text
    assert "epoch 7 of 20" in text
    assert "4,096 samples of 2 peers" not in text  # epochs show in the view, not line by line


def test_a_frame_shows_how_good_the_model_is() -> None:
    assert "model epoch 5: loss 2.0" in drawn(Frame(replace(STATUS, evaluated="epoch 5: loss 2.0")))
    assert "model" not in drawn(Frame(STATUS))


def test_a_frame_shows_progress_figures_and_peers() -> None:
    text = drawn(Frame(replace(STATUS, last_epoch=epoch(7), losses=(4.0, 3.0, 2.0))))
    for expected in (
        "stdlib-lm  trainer alice  training",
        "epoch 7 of 20",
        "1,024 of 4,096 samples",
        "3 s left",
        "loss 2.0000  █▅▁",
        "400.0 samples/s",
        "last epoch 8.0 s, 0.2 s of it averaging",
    ):
        assert expected in text
    lines = text.splitlines()
    assert [line.split() for line in lines[-3:]] == [
        ["alice", "trainer", "7", "300.0", "2.000", "now"],
        ["bob", "trainer", "4", "100.0", "4.000", "7.0", "s", "ago"],
        ["cccccccccc", "auxiliary", "7", "–", "–", "now"],
    ]


def test_of_many_peers_some_are_shown_and_the_others_counted() -> None:
    many = tuple(replace(PEERS[1], peer_id=f"{number:052}") for number in range(100))
    text = drawn(Frame(replace(STATUS, peers=many)))
    assert text.count("bob") == 12 and "and 88 more" in text


def test_names_cannot_steer_the_terminal() -> None:
    hostile = replace(
        STATUS, name="\x1b[2J", run_id="[bold]x\x07", peers=(replace(PEERS[0], name="\x1b]0;x\x07\n\u202eevil"),)
    )
    text = drawn(Frame(hostile))
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "[bold]x" in text and "]0;x evil" in text


def test_a_little_curve_goes_from_the_lowest_to_the_highest_bar() -> None:
    assert sparkline([1.0, 8.0]) == BARS[0] + BARS[-1]
    assert sparkline([3.0, 3.0]) == BARS[0] * 2


# ---- on a narrow terminal


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_a_frame_keeps_its_height_and_its_width_however_many_epochs_there_were(width: int) -> None:
    heights = set()
    for epochs in (0, 1, 2, 20, 60):
        file = io.StringIO()
        where = Console(file=file, width=width, height=40)
        losses = tuple(float(number) for number in range(epochs))
        where.print(Frame(replace(STATUS, epoch=17, last_epoch=epoch(7), losses=losses)))
        lines = file.getvalue().splitlines()
        heights.add(len(lines))
        assert max(map(len, lines)) <= width
    assert heights == {8}  # four of the head, a heading, and three peers


def test_eighty_columns_have_room_for_a_curve_and_all_columns() -> None:
    file = io.StringIO()
    last = replace(epoch(7), seconds=1.4, averaging_seconds=0.3)
    losses = tuple(float(number) for number in range(60))
    Console(file=file, width=80).print(Frame(replace(STATUS, last_epoch=last, losses=losses)))
    text = file.getvalue()
    assert "last epoch 1.4 s, 0.3 s of it averaging" in text and BARS[-1] in text
    assert "…" not in text and all(name in text for name in ("role", "samples/s", "loss", "seen"))


def test_sixty_columns_are_filled_with_what_fits_whole() -> None:
    file = io.StringIO()
    status = replace(STATUS, run_eta_seconds=2820.0, last_epoch=replace(epoch(7), seconds=70.0, averaging_seconds=0.5))
    Console(file=file, width=60, height=20).print(Frame(status, replace(ME, samples=1_031_168)))
    assert "…" not in file.getvalue()
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert lines[1].startswith("epoch 7 of 20 ") and lines[1].endswith(" 1,024 of 4,096 samples 3 s left")
    assert lines[2] == "loss –   400.0 samples/s   last epoch 70 s"
    assert lines[3] == "mine 75% of the latest samples   1,031,168 in all"


def test_at_forty_columns_the_table_does_without_some() -> None:
    file = io.StringIO()
    Console(file=file, width=40).print(Frame(STATUS))
    table = file.getvalue().splitlines()[4:]
    assert table[0].split() == ["peer", "epoch", "samples/s", "loss"]
    assert table[1].split() == ["alice", "7", "300.0", "2.000"]
    assert not any("…" in line for line in table)


def test_a_long_event_is_wrapped_between_words_on_a_terminal_and_not_at_all_in_a_pipe() -> None:
    words = " ".join(["something"] * 20)
    for terminal in (True, False):
        file = io.StringIO()
        where = Console(file=file, force_terminal=terminal, width=40, height=40, highlight=False, markup=False)
        events = Events()
        with LiveView(lambda: STATUS, events, console=where, clock=lambda: 0.0):
            events.emit(Noticed("warning", words))
        told = [line for line in file.getvalue().splitlines() if "something" in line]
        assert sum(line.count("something") for line in told) == 20
        assert (len(told) > 1) is terminal


# ---- for the user of this peer

ME = Me(
    peer_id=ALICE,
    name="alice",
    role="trainer",
    sentence="Training at 300 samples a second, epoch 7 of 20",
    connectivity="",
    share=0.75,
    samples=12_400,
    hours=3.1,
    rank=3,
    ranked=7,
    totals=Totals(rounds_committed=41),
    limits={
        "limits": {
            "upload": {"value": 2e6, "text": "2 MB/s", "from": "set while it runs"},
            "hours": {"value": None, "text": "none", "from": "--limit"},
            "busy_above": {"value": 0.25, "text": "25%", "from": ""},  # by default
        }
    },
)


def test_a_frame_tells_what_this_peer_has_given_and_which_limits_are_set() -> None:
    lines = [line.rstrip() for line in drawn(Frame(STATUS, ME)).splitlines()]
    assert "mine 75% of the latest samples   12,400 in all   41 rounds   3.1 h   place 3 of 7" in lines
    one = replace(ME, told_by="by one peer's count")
    assert "place 3 of 7 by one peer's count" in drawn(Frame(STATUS, one))
    assert "limits upload 2 MB/s" in lines
    helps = replace(ME, role="auxiliary", share=None, rank=None, limits={}, totals=Totals(bytes_sent=3_000_000))
    text = drawn(Frame(STATUS, helps))
    assert "sent to others" in text and "limits" not in text and "place" not in text


def test_a_paused_peer_says_so_in_its_first_line_and_why() -> None:
    activity = ActivityShown(state="paused", reasons=(Reason(kind="battery", text="on battery"),))
    first = drawn(Frame(STATUS, replace(ME, activity=activity, sentence="Paused: on battery"))).splitlines()[0]
    assert "Paused: on battery" in first and "training" not in first


def test_the_latest_events_stand_below_and_warnings_scroll_above() -> None:
    where, file = console(terminal=True)
    events = Events()
    with LiveView(lambda: STATUS, events, console=where, clock=lambda: 0.0):
        for number in range(9):
            events.emit(Noticed("info", f"news {number}"))
        events.emit(Noticed("warning", "the disk is full"))
    last = file.getvalue().split("the disk is full")[-1]
    assert [f"news {number}" in last for number in range(9)] == [False] * 3 + [True] * 6


def test_what_the_session_says_is_shown_with_the_news() -> None:
    for plain in (True, False):
        where, file = console(terminal=True)
        with LiveView(lambda: STATUS, Events(), console=where, plain=plain, clock=lambda: 0.0) as view:
            view.say("Ctrl-C again leaves at once")
        assert "Ctrl-C again leaves at once" in file.getvalue()


def test_the_last_line_leaves_room_for_what_a_terminal_echoes() -> None:
    file = io.StringIO()
    Console(file=file, width=60, height=30).print(Frame(STATUS, ME, [news("news " * 20)]))
    assert len(file.getvalue().splitlines()[-1].rstrip()) == 58


PATH = "/home/ada/.local/share/swarm/stdlib-lm-ntktqvpw/monitor-1/checkpoints/epoch-000060"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "paused: you asked for it, until 18:00 (480 computed samples count when the run goes on)",
            ["paused: you asked for it, until 18:00 (480", "computed samples count when the run goes on)"],
        ),
        (f"checkpoint of epoch 60 at {PATH}", ["checkpoint of epoch 60 at", "…/monitor-1/checkpoints/epoch-000060"]),
        (
            "checkpoint of epoch 60 at C:" + PATH.replace("/", "\\"),
            ["checkpoint of epoch 60 at", r"…\monitor-1\checkpoints\epoch-000060"],
        ),
        ("saved at /runs/x", ["saved at /runs/x"]),
        ("news " * 40, ["news " * 8 + "news", "news " * 9 + "ne…"]),
    ],
)
def test_at_sixty_columns_an_event_is_told_in_whole_words_on_two_lines(text: str, shown: list[str]) -> None:
    file = io.StringIO()
    Console(file=file, width=60, height=20).print(Frame(STATUS, None, [news("news"), news(text)]))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert [line[10:] for line in lines[-len(shown) :]] == shown
    assert lines[-len(shown) - 1].endswith("  news") and lines[-len(shown)][:10].strip().count(":") == 2


def test_the_room_for_events_stays_as_high_as_it_is() -> None:
    heights = set()
    for count in (1, 2, 3, 4, 5):
        file = io.StringIO()
        said = [news("news " * (20 if number % 2 else 1)) for number in range(count)]
        Console(file=file, width=60, height=20).print(Frame(STATUS, None, said))
        heights.add(len(file.getvalue().splitlines()))
    assert len(heights) == 1


def test_plain_and_dumb_terminals_get_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for plain, term in ((True, "xterm"), (False, "dumb")):
        monkeypatch.setenv("TERM", term)
        where, file = console(terminal=True)
        events = Events()
        with LiveView(lambda: STATUS, events, console=where, plain=plain, clock=lambda: 0.0):
            events.emit(epoch(8))
        assert "4,096 samples of 2 peers" in file.getvalue() and "epoch 7 of 20" not in file.getvalue()


def test_a_terminal_of_few_lines_shows_fewer_peers_so_that_all_else_fits() -> None:
    many = tuple(replace(PEERS[1], peer_id=f"{number:052}") for number in range(100))
    file = io.StringIO()
    said = [news("news")] * 4
    Console(file=file, width=80, height=20).print(Frame(replace(STATUS, peers=many), ME, said))
    lines = file.getvalue().splitlines()
    assert len(lines) < 20 and "and 94 more" in file.getvalue() and lines[-1].endswith("news")


def test_a_terminal_that_knows_ascii_alone_gets_ascii() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii", errors="replace")  # as the command sets its streams
    Console(file=file, width=60, height=30, no_color=True).print(Frame(replace(STATUS, losses=(1.0, 2.0)), ME))
    file.flush()
    assert b"loss 2.0000   400.0 samples/s" in raw.getvalue()  # without the curve
