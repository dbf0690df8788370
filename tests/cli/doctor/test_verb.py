"""How `swarm doctor` shows what it finds, and ends."""

from __future__ import annotations

import io
import json
import threading

import pytest
from rich.console import Console
from rich.text import Text

from swarmcli.cli.doctor import verb
from swarmcli.cli.doctor.finding import Check, Context, Finding
from tests.cli.typed import typed


def test_the_verb_ends_with_1_on_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = ["OK", "FAIL"]
    check = Check("odd", lambda context: [Finding("odd", each, "found", "mend it") for each in outcomes])  # type: ignore[arg-type]
    monkeypatch.setattr(verb, "CHECKS", (check,))
    done = typed(verb.doctor)(code=1)
    assert done.stdout.startswith("OK    odd: found\nFAIL  odd: found\n      → mend it\n")
    outcomes.remove("FAIL")
    done = typed(verb.doctor)("--json")
    assert json.loads(done.stdout) == {"check": "odd", "outcome": "OK", "text": "found", "fix": "mend it"}


class Screen(io.StringIO):
    """Keeps what is written, and tells once a check was named in it."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = threading.Event()

    def write(self, text: str) -> int:
        if "finding out" in text:
            self.shown.set()
        return super().write(text)


@pytest.mark.parametrize(
    ("terminal", "words", "quiet", "told"),
    [(True, [], False, True), (True, [], True, False), (True, ["--json"], False, False), (False, [], False, False)],
)
def test_who_waits_at_a_terminal_sees_for_what(
    terminal: bool, words: list[str], quiet: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()

    def look(context: Context) -> list[Finding]:
        assert not told or screen.shown.wait(60)
        return [Finding("odd", "OK", "found")]

    monkeypatch.setattr(verb, "CHECKS", (Check("odd", look, 60.0, "finding out"),))
    monkeypatch.setattr(verb, "out", Console(file=screen, force_terminal=terminal, _environ={"TERM": "xterm"}))
    monkeypatch.setattr(verb, "err", Console(quiet=quiet))
    typed(verb.doctor)(*words)
    assert screen.shown.is_set() == told
    if not (told or words):
        assert Text.from_ansi(screen.getvalue()).plain.strip() == "OK    odd: found\n\nnothing is broken"
