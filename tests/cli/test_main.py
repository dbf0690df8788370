from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarmcli.cli import main as command
from swarmcli.errors import (
    AddressError,
    BootstrapError,
    ConnectionLost,
    DataError,
    FingerprintError,
    RecipeError,
    SwarmError,
)


def swarm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "swarmcli.cli.main", *words], capture_output=True, text=True)


def test_help_names_every_verb_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from swarmcli.cli.main import app; from typer.main import get_command;"
        "print(*get_command(app).commands);"
        "print(*(set(sys.modules) & {'torch', 'transformers', 'fastapi', 'numpy', 'pydantic'}))"
    )
    verbs, heavy = subprocess.check_output([sys.executable, "-c", code], text=True).split("\n")[:2]
    expected = "init join aux monitor link demo log validate netcheck invite revoke members sign"
    assert verbs == expected
    assert heavy == ""


def test_help_shows_flags_as_they_are_typed() -> None:
    pages = [swarm(*words, "--help").stdout for words in ([], ["join"], ["log"], ["validate"])]
    assert "--client-mode" in pages[1]
    assert not any("<bool>" in page for page in pages)


def test_an_interrupt_before_anything_began_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("swarmcli.recipe.load_recipe", interrupt)
    monkeypatch.setattr(sys, "argv", ["swarm", "join", str(tmp_path / "recipe.yaml")])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 130
    assert "swarm: interrupted" in capsys.readouterr().err


def test_importing_the_package_loads_neither_transformers_nor_a_web_server() -> None:
    code = (
        "import sys, threading, swarmcli; swarmcli.DHT; swarmcli.Optimizer; swarmcli.DecentralizedAverager;"
        "print(*(set(sys.modules) & {'transformers', 'fastapi', 'uvicorn'}), threading.active_count())"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["1"]


def test_threads_that_wait_for_each_other_sleep_soon_unless_the_user_says_how_they_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "app", lambda: None)
    for name in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "active"})
    command.main()
    assert os.environ == {"OMP_WAIT_POLICY": "active"}
    monkeypatch.setattr(os, "environ", {"GOMP_SPINCOUNT": "5"})
    command.main()
    assert os.environ == {"GOMP_SPINCOUNT": "5", "KMP_BLOCKTIME": "1"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RecipeError("x"), 2),
        (AddressError("x"), 2),
        (BootstrapError("x"), 3),
        (FingerprintError("x"), 4),
        (DataError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_kind_of_failure_has_an_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(command, "app", fail)
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == code


def test_a_first_contact_that_does_not_answer_is_named_with_what_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise BootstrapError("no first contact answered", {"tcp://nowhere:1": OSError("connection refused")})

    monkeypatch.setattr(command, "app", fail)
    with pytest.raises(SystemExit):
        command.main()
    said = capsys.readouterr()
    assert "tcp://nowhere:1: connection refused" in said.err
    assert said.out == ""


@pytest.mark.parametrize("kind", [SwarmError, ZeroDivisionError])
def test_what_a_stranger_says_of_a_failure_steers_no_terminal(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise kind("closed by peer: \x1b]0;owned\x07\x1b[2J\x9b31m\u202eor")

    monkeypatch.setattr(command, "app", fail)
    with pytest.raises(SystemExit):
        command.main()
    assert "closed by peer: ]0;owned[2J31mor\n" in capsys.readouterr().err


def test_a_first_contact_that_does_not_answer_has_one_line_whatever_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise BootstrapError("no answer", {"tcp://198.51.100.7:1": ConnectionLost("go\r\nswarm: all is well\x1b[2J")})

    monkeypatch.setattr(command, "app", fail)
    with pytest.raises(SystemExit):
        command.main()
    _, line, _ = capsys.readouterr().err.splitlines()
    assert line == "  tcp://198.51.100.7:1: go  swarm: all is well[2J"


def test_a_fault_of_our_own_shows_where(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(command, "app", fail)
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 1
    assert "ZeroDivisionError: oops" in capsys.readouterr().err


def test_an_unknown_verb_is_a_usage_error() -> None:
    done = swarm("jion")
    assert done.returncode == 2
    assert "jion" in done.stderr


def test_a_missing_recipe_is_a_recipe_error(tmp_path: Path) -> None:
    done = swarm("join", str(tmp_path / "none.yaml"))
    assert done.returncode == 2
    assert "none.yaml" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_version_is_told() -> None:
    assert swarm("--version").stdout.startswith("swarm 0.")
