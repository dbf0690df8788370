from __future__ import annotations

import io
import logging
from dataclasses import replace

import pytest

from swarmcli.cli.console import (
    ConsoleHandler,
    aloud,
    epoch_line,
    err,
    event_line,
    out,
    round_line,
    setup_logging,
)
from swarmcli.events import EpochAdvanced, Events, Noticed, RoundFinished
from swarmcli.journal import Line


@pytest.fixture
def untouched_logging() -> object:
    root, ours = logging.getLogger(), logging.getLogger("swarmcli")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], level, own_level = before
    root.setLevel(level)
    ours.setLevel(own_level)


@pytest.mark.usefixtures("untouched_logging")
def test_without_verbose_only_warnings_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    logging.getLogger("swarmcli.x").info("chatter")
    logging.getLogger("swarmcli.x").warning("look here")
    setup_logging(verbose=True)
    logging.getLogger("swarmcli.x").debug("everything")
    logging.getLogger("elsewhere").info("foreign chatter")
    captured = capsys.readouterr()
    assert captured.out == "" and not out.stderr and err.stderr
    assert [line.partition(" ")[2] for line in captured.err.splitlines()] == [
        "warning: look here",
        "debug swarmcli.x: everything",
    ]
    logging.getLogger("swarmcli.x").warning("it said %s", "\x1b]0;owned\x07\x9b2J\u202e")
    said = capsys.readouterr().err
    assert said.endswith("warning swarmcli.x: it said ]0;owned2J\n"), "a file that is shown later steers no terminal"
    Events().emit(Noticed("warning", "the disk is full"))
    assert capsys.readouterr().err == "", "a view shows it"
    setup_logging(who="process 1")
    Events().emit(Noticed("warning", "the disk is full"))
    assert "[process 1] warning: the disk is full" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_warnings_and_questions_are_heard_also_with_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(err, "quiet", True)
    with aloud():
        assert not err.quiet
    assert err.quiet
    monkeypatch.setattr("sys.stderr", Terminal())
    before = logging.getLogger().handlers[:]
    try:
        setup_logging()
        assert not isinstance(logging.getLogger().handlers[0], ConsoleHandler)
        monkeypatch.setattr(err, "quiet", False)
        setup_logging()
        assert isinstance(logging.getLogger().handlers[0], ConsoleHandler)
    finally:
        logging.getLogger().handlers[:] = before


EPOCH = EpochAdvanced(3, "ab", 4096, 2048, 2, 2.5, 8.0, 0.25)
ROUND = RoundFinished(
    "ab", "grads", "committed", "", 2, "a", ("a", "b"), ("a", "b"), {}, 2_000_000, 999, {"running all-reduce": 0.25}
)


def test_an_epoch_says_what_it_knows_and_a_round_who_was_in_it_and_why_it_failed() -> None:
    line = epoch_line(replace(EPOCH, loss=None, samples=0))
    assert line == "epoch 3  taken over from another peer", "nobody here knows how long it took"
    assert round_line(ROUND) == "round at epoch 2 committed  2 peers  0.2 s  2.0 MB sent, 999 B received"
    failed = replace(ROUND, outcome="failed", reason="b\x1b died", contributors=("a",), epoch=-1)
    assert round_line(failed) == "round failed: b died  1 contributed, 2 members  0.2 s  2.0 MB sent, 999 B received"
    assert event_line(Line("info", "x", "", "hello")) == "hello"
    assert event_line(Line("error", "x", "", "oh\nno")) == "error: oh no"
