"""`swarm log` on journals that real code wrote; tests/journal/test_processes.py has it follow a living process."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from swarmcli.cli.console import day
from swarmcli.cli.log import followed, log, show
from swarmcli.errors import JournalError, UsageError
from swarmcli.events import CheckpointWritten, Contribution, EpochAdvanced, PeerRefused, PeerSeen, RoundFinished
from swarmcli.journal import Journal, JournalReader, RunRecord

ALICE, BOB = "a" * 52, "b" * 52
START = 1_790_000_000.0
ESCAPE = "\x1b]0;owned\x07\x1b[31m\u202ebob"


def write_run(path: Path, *, close: bool = True) -> Journal:
    moment = [START]

    def clock() -> float:
        moment[0] += 1.0
        return moment[0]

    journal = Journal(path, run=RunRecord("stdlib-lm", "trainer", ALICE, "alice", "0.1.0"), clock=clock)
    journal.record(PeerSeen(BOB, ESCAPE, "trainer", 1, 10, 12.5, False))
    for number in range(1, 13):
        failed = number == 5
        outcome = ("failed", "bob was killed") if failed else ("committed", "")
        took_part = ((ALICE,), {BOB: "silent"}) if failed else ((ALICE, BOB), {})
        traffic = (2_000_000, 1_000_000, {"averaging": 0.25})
        journal.record(
            RoundFinished("ab" * 32, "grads", *outcome, number - 1, ALICE, (ALICE, BOB), *took_part, *traffic)  # type: ignore[arg-type]
        )
        journal.record(EpochAdvanced(number, "cd" * 32, 4096, 2048, 2, 5.0 - number / 4, 8.0, 0.25, 1.2345, 0.0625))
    journal.record(PeerRefused(BOB, "its recipe differs in seed", "recipe"))
    journal.record(CheckpointWritten(12, "runs/x", 12_400_000))
    if close:
        journal.close()
    else:
        journal.flush(30)
    return journal


def test_a_peer_without_a_name_is_listed_once_by_its_id(path: Path) -> None:
    journal = Journal(path, run=RunRecord("stdlib-lm", "trainer", ALICE, "alice", "0.1.0"), clock=lambda: START)
    journal.record(PeerSeen("c" * 52, "c" * 10, "trainer", 1, 10, 12.5, False))
    journal.close()
    assert run(path, "--peers").output.count("c" * 10) == 1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "trainer-1" / "journal.sqlite"
    write_run(path)
    return path


def printed(
    path: Path,
    lists: Sequence[str] = (),
    last: int | None = None,
    *,
    as_json: bool = False,
    terminal: bool = False,
    now: float = START + 100,
) -> str:
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=200, highlight=False, markup=False, emoji=False
    )
    show(str(path), lists, last, as_json=as_json, console=console, now=lambda: now)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_summary_says_how_it_went(path: Path) -> None:
    text = printed(path)
    for expected in (
        "stdlib-lm  trainer alice",
        "1 to 12",
        "4.7500 → 2.0000",
        "24,576 of 49,152 are this peer's",
        "11 committed, 1 failed, 0 undecided",
        "1 × bob was killed",
        "24 MB sent, 12 MB received",
        "1 peer seen, 1 there at the end",
        ": done",
    ):
        assert expected in text


def test_a_run_that_goes_on_and_one_that_was_killed_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = write_run(path, close=False)
    running, killed = printed(path, now=START + 40), printed(path, now=START + 4000)
    assert "running for" in running and "1 peer seen, 1 there now" in running
    assert "stopped without closing the journal" in killed and "1 there when it was last written" in killed
    journal.close()


def test_a_peer_that_was_killed_while_the_journals_owner_was_away_is_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    for moment, peer in ((START, BOB), (START + 1000, "c" * 52)):
        run = RunRecord("stdlib-lm", "trainer", ALICE, "alice", "0.1.0")
        with Journal(path, run=run, clock=partial(float, moment)) as journal:
            journal.record(PeerSeen(peer, peer[:3], "trainer", 7, 10, 12.5, False))
    text = printed(path, now=START + 1010)
    assert "2 peers seen, 1 there at the end" in text
    assert f"bbb, trainer, epoch 7, not heard of since {day(START)}\n" in text
    assert "ccc, trainer, epoch 7\n" in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "epochs",
            ["epoch 1  loss 4.7500  4,096 samples of 2 peers  8.0 s, 0.2 s of it", "gradient 1.23, update 0.0625"],
        ),
        (
            "rounds",
            ["round at epoch 0 committed  2 peers", "failed: bob was killed", "bob (bbbbbbbbbb): silent"],
        ),
        ("events", ["warning: ", "bob (bbbbbbbbbb): its recipe differs in seed", "checkpoint of epoch 12"]),
        ("peers", ["bbbbbbbbbb, trainer, epoch 1, 12.5 samples/s"]),
    ],
)
def test_each_list_has_a_line_for_each_row(path: Path, name: str, expected: list[str]) -> None:
    for terminal in (False, True):
        text = printed(path, (name,), terminal=terminal)
        assert all(words in text for words in expected)
    assert all(line.startswith(day(START)[:11]) for line in printed(path, (name,)).splitlines()), "nothing is cut"
    with Journal(path.with_name("empty"), run=RunRecord("r", "monitor", ALICE), clock=lambda: START):
        pass
    assert printed(path.with_name("empty"), (name,)) == f"no {name} yet\n"


def test_json_is_one_object_per_line_with_everything_in_it(path: Path) -> None:
    (line,) = printed(path, as_json=True).splitlines()
    summary = json.loads(line)
    assert (summary["run_id"], summary["rounds_failed"], summary["outcome"]) == ("stdlib-lm", 1, "done")
    failed = [json.loads(line) for line in printed(path, ("rounds",), as_json=True).splitlines()][4]
    assert failed["left_out"] == {BOB: "silent"} and failed["members"] == [ALICE, BOB]
    rows = [json.loads(line) for line in printed(path, ("epochs", "rounds"), 2, as_json=True).splitlines()]
    last = [("rounds", 10), ("epochs", 11), ("rounds", 11), ("epochs", 12)]
    assert [(row["table"], row["epoch"]) for row in rows] == last, "of each list the last two, in the order of time"
    assert {(row["gradient_norm"], row["update_norm"]) for row in rows[1::2]} == {(1.2345, 0.0625)}


def test_a_name_cannot_steer_the_terminal(path: Path) -> None:
    for lists, terminal in product(((), ("peers",), ("events",)), (False, True)):
        text = printed(path, lists, terminal=terminal)
        assert "\x1b]0;" not in text and "\x07" not in text and "\u202e" not in text
        assert "]0;owned[31mbob" in text


def test_following_gives_the_last_rows_and_then_each_new_one_once(tmp_path: Path) -> None:
    journal = write_run(tmp_path / "journal.sqlite", close=False)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        journal.record(EpochAdvanced(100 + len(waits), "cd" * 32, 4096, 2048, 2, None, 8.0, 0.25))
        journal.flush(30)

    with JournalReader(journal.path) as reader:
        records = followed(reader, "stdlib-lm", ("epochs",), 2, wait)
        assert [next(records).epoch for _ in range(4)] == [11, 12, 101, 102]  # type: ignore[union-attr]
    journal.close()


# ---- the command


def run(*words: object) -> Result:
    app = typer.Typer()
    app.command()(log)
    return CliRunner().invoke(app, [str(word) for word in words])


def test_what_is_no_journal_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    for content in (None, b"", b"something else" * 100):
        if content is not None:
            path.write_bytes(content)
        error = run(path).exception
        assert isinstance(error, UsageError if content is None else JournalError) and str(path) in str(error)


def test_the_options_reach_what_they_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr("swarmcli.cli.log.show", lambda *args, **how: asked.append((*args, how)))
    assert run(path, "--rounds", "--peers", "-n", "3", "--json", "-f").exit_code == 0
    assert asked == [(str(path), ["rounds", "peers"], 3, {"as_json": True, "follow": True})]
    assert run("--last", "0").exit_code == 2

    def interrupted(*args: object, **how: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("swarmcli.cli.log.show", interrupted)
    assert run(path, "--follow").exit_code == 0, "it is the usual end of following"
    assert run(path).exit_code != 0


def test_samples_of_epochs_at_which_this_peer_was_away_are_told_as_the_book_has_them(path: Path) -> None:
    assert "samples  24,576 of 49,152 are this peer's" in printed(path)
    with Journal(path, run=RunRecord("stdlib-lm", "trainer", ALICE, "alice", "0.1.0"), clock=lambda: START) as journal:
        journal.record(Contribution(ALICE, samples=30_000.0, run_id="stdlib-lm"))
        journal.record(Contribution(BOB, samples=45_552.0, run_id="stdlib-lm"))
    assert "samples  30,000 of 75,552 are this peer's" in printed(path)
    other = path.with_name("monitor.sqlite")
    with Journal(other, run=RunRecord("stdlib-lm", "monitor", BOB, "bob", "0.1.0"), clock=lambda: START) as journal:
        journal.record(EpochAdvanced(1, "cd" * 32, 4096, 0, 2, 5.0, 8.0, 0.25, 1.2345, 0.0625))
    assert "samples  4,096, all of other peers" in printed(other)
