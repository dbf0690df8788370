from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from swarmcli.cli.console import ConsoleHandler, aloud, err, out, setup_logging
from swarmcli.events import Events, Noticed


def test_data_goes_to_stdout_and_words_to_stderr() -> None:
    assert not out.stderr and err.stderr


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
    assert captured.out == ""
    assert [line.partition(" ")[2] for line in captured.err.splitlines()] == [
        "WARNING swarmcli.x: look here",
        "DEBUG swarmcli.x: everything",
    ]


@pytest.mark.usefixtures("untouched_logging")
def test_a_notice_is_in_the_log_only_where_no_view_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    Events().emit(Noticed("warning", "the disk is full"))
    assert capsys.readouterr().err == ""
    setup_logging(who="process 1")
    Events().emit(Noticed("warning", "the disk is full"))
    assert "[process 1] WARNING swarmcli.notices: the disk is full" in capsys.readouterr().err


@pytest.mark.usefixtures("untouched_logging")
def test_a_log_that_goes_to_a_file_steers_no_terminal_that_shows_it_later(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    logging.getLogger("swarmcli.x").warning("it said %s", "\x1b]0;owned\x07\x9b2J\u202e")
    assert capsys.readouterr().err.endswith("WARNING swarmcli.x: it said ]0;owned2J\n")


def test_log_lines_on_a_terminal_keep_their_lines_and_lose_what_steers() -> None:
    file = io.StringIO()
    handler = ConsoleHandler(Console(file=file, width=60, color_system=None))
    record = logging.LogRecord("x", logging.WARNING, "f", 1, "first\nsecond [bold]\x1b]0;owned\x07", (), None)
    handler.emit(record)
    assert file.getvalue() == "first\nsecond [bold]]0;owned\n"


def test_who_is_asked_something_hears_it_also_with_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(err, "quiet", True)
    with aloud():
        assert not err.quiet
    assert err.quiet


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_warnings_are_heard_also_with_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(err, "quiet", True)
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
