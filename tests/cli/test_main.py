from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarmcli.cli import main as command
from swarmcli.errors import (
    AddressError,
    BootstrapError,
    ConnectionLost,
    DataError,
    FingerprintError,
    RecipeError,
    SwarmError,
    UsageError,
)
from swarmcli.journal import JOURNAL_NAME, Journal, RunRecord
from swarmcli.network.identity import Identity
from swarmcli.recipe import digest_of, load_recipe


@pytest.fixture(autouse=True)
def own_interrupts() -> Iterator[None]:
    """The command gives them up at its end."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def modules_after(code: str) -> set[str]:
    """What is imported beside Python's own, typer and the terminal's help."""
    found = subprocess.check_output([sys.executable, "-c", f"import sys; {code}; print(*sys.modules)"], text=True)
    return set(found.splitlines()[-1].split())


HEAVY = {
    *("asyncio", "cryptography", "fastapi", "httpx", "msgspec", "numpy", "psutil", "pydantic", "torch", "transformers"),
    *("swarmcli.events", "swarmcli.journal", "swarmcli.network", "swarmcli.recipe"),
}


def test_help_names_every_verb_and_loads_none_of_them() -> None:
    loaded = modules_after("from swarmcli.cli import main; main.app")
    assert not loaded & HEAVY
    of_command = {f"swarmcli.cli.{name}" for name in ("main", "ending", "processes", "verbs")}
    assert {name for name in loaded if name.startswith("swarmcli.cli.")} == of_command
    said = " ".join(CliRunner().invoke(command.app, ["--help"]).stdout.split())
    assert all(f"{name} {verb.help}" in said for name, verb in command.VERBS.items())
    assert " ".join(CliRunner().invoke(command.app, []).stdout.split()) == said
    join = CliRunner().invoke(command.app, ["join", "--help"]).stdout
    assert "--client-mode" in join and "<bool>" not in join, "flags are shown as they are typed"
    done = CliRunner().invoke(command.app, ["jion"])
    assert done.exit_code == 2 and "jion" in done.stderr
    assert CliRunner().invoke(command.app, ["--version"]).stdout.startswith("swarm 0.")


def test_mistyped_words_links_of_a_run_and_what_its_owner_does_need_no_torch(tmp_path: Path) -> None:
    """Loading it takes seconds."""
    (tmp_path / "link").write_text(f"swarm://{Identity.from_seed(1).peer_id.text}@[::1]:1/a/fingerprint={'a' * 32}\n")
    recipe = str(tmp_path / "lab.yaml")
    CliRunner().invoke(command.app, ["init", "--invite", recipe], catch_exceptions=False)
    link = f"swarm://{Identity.from_seed(1).peer_id.text}@[::1]:1/lab/fingerprint={digest_of(load_recipe(recipe))}"
    asks = [["join", "--help"], ["log", str(tmp_path)], ["validate", "--quick", recipe]]
    mistakes = [["join", "swarm://x"], ["join", "gone.yaml"], ["link", str(tmp_path)]]
    owners = [["invite", recipe, "--link", link], ["revoke", recipe, "Ada"], ["members", recipe]]
    code = "from swarmcli.cli.main import app; from typer.testing import CliRunner; run = CliRunner().invoke"
    loaded = modules_after(f"{code}; print([str(run(app, each).exception) for each in {[*asks, *mistakes, *owners]}])")
    assert {"swarmcli.peer.home", "swarmcli.owner.visit", "swarmcli.cli.validate"} < loaded and "torch" not in loaded
    assert "invited" in (tmp_path / "lab.run-key.ledger").read_text()


@pytest.mark.parametrize("verb", command.OLD_VERBS)
def test_a_verb_of_earlier_versions_says_what_is_written_in_its_place(verb: str) -> None:
    done = CliRunner().invoke(command.app, [verb, "--any", "swarm://x"])
    assert isinstance(done.exception, UsageError) and f"write: {command.OLD_VERBS[verb]}" in str(done.exception)


@pytest.mark.parametrize("verb", command.VERBS)
def test_the_help_of_all_verbs_says_of_each_what_its_own_help_says_which_has_an_example(verb: str) -> None:
    loaded = command.load(verb)
    assert " ".join(loaded.help.split("\n\n")[0].split()) == command.VERBS[verb].help
    for name, each in getattr(loaded, "commands", {"": loaded}).items():
        assert "quiet" in {option.name for option in each.params}
        typed = f"swarm {verb} {name}".rstrip()
        assert re.search(rf"{typed}(?!\w)", "\n".join((each.help or "", each.epilog or ""))), typed


def test_help_breaks_no_line_where_its_docstring_does() -> None:
    assert "(11 million parameters, for laptops" in (command.load("init").help or "")
    assert "\nswarm validate my-run/recipe.yaml\n" in (command.load("validate").help or "")


def test_a_variable_stands_for_each_option_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWARM_LOG_JSON", "1")
    monkeypatch.setenv("SWARM_LOG_LAST", "none")
    done = CliRunner().invoke(command.app, ["log", str(tmp_path)])
    assert done.exit_code == 2 and "--last" in done.output
    monkeypatch.delenv("SWARM_LOG_LAST")
    Journal(tmp_path / JOURNAL_NAME, run=RunRecord("a-run", "trainer", "peer"), clock=time.time).close("done")
    assert '"run_id": "a-run"' in CliRunner().invoke(command.app, ["log", str(tmp_path)]).stdout


def test_an_interrupt_before_anything_began_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for module in ("swarmcli.cli.site.process", "swarmcli.cli.site.join", "swarmcli.peer.linked"):
        importlib.import_module(module)  # whoever is imported first while it is replaced keeps it for all later tests
    monkeypatch.setattr("swarmcli.cli.linking.load_recipe", interrupt)
    monkeypatch.setattr(sys, "argv", ["swarm", "join", str(tmp_path / "recipe.yaml")])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 130
    assert "swarm: interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL  # one more ends it without a traceback, whatever it is at


def test_threads_that_wait_for_each_other_sleep_soon_unless_the_user_says_how_they_wait() -> None:
    names = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")
    plain = {name: value for name, value in os.environ.items() if name not in names}

    def after(**given: str) -> list[str | None]:
        code = f"import json, os, swarmcli; print(json.dumps([os.environ.get(name) for name in {names!r}]))"
        said = subprocess.check_output([sys.executable, "-c", code], env={**plain, **given}, text=True)
        return list(json.loads(said))

    assert after() == ["1000", "1", None]
    assert after(GOMP_SPINCOUNT="5") == ["5", "1", None]
    assert after(OMP_WAIT_POLICY="active") == [None, None, "active"]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """With which code the command ends, and what it says, when a verb raises this."""

    def ends(error: BaseException) -> tuple[int, str]:
        def fail() -> None:
            raise error

        monkeypatch.setattr(command, "app", fail)
        with pytest.raises(SystemExit) as end:
            command.main()
        said = capsys.readouterr()
        assert said.out == "" and isinstance(end.value.code, int)
        return end.value.code, said.err

    return ends


def test_each_kind_of_failure_has_an_exit_code_and_a_fault_of_our_own_shows_where(ends: Any) -> None:
    for error, code in (
        (RecipeError("x"), 2), (AddressError("x"), 2), (BootstrapError("x"), 3), (FingerprintError("x"), 4),
        (DataError("x"), 1), (KeyboardInterrupt(), 130),
    ):  # fmt: skip
        assert ends(error)[0] == code
    code, said = ends(ZeroDivisionError("oops"))
    assert code == 1 and "ZeroDivisionError: oops" in said and "Traceback" in said


def test_a_first_contact_that_does_not_answer_has_one_line_whatever_it_says(ends: Any) -> None:
    said = ends(
        BootstrapError("no answer", {"tcp://198.51.100.7:1": ConnectionLost("go\r\nswarm: all is well\x1b[2J")})
    )
    assert said[1].splitlines()[1] == "  tcp://198.51.100.7:1: go  swarm: all is well[2J" and said[1].count("\n") == 3
    for kind in (SwarmError, ZeroDivisionError):
        steering = kind("closed by peer: \x1b]0;owned\x07\x1b[2J\x9b31m\u202eor")
        assert "closed by peer: ]0;owned[2J31mor\n" in ends(steering)[1]


def test_what_an_output_cannot_show_ends_no_command() -> None:
    code = "from swarmcli.cli.main import show_what_can_be_shown as begin; begin(); print('loss ▁▂ of Ωmega')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == "loss ?? of ?mega"


def test_shells_complete_verbs_and_options() -> None:
    def completed(words: str, position: int) -> list[str]:
        asked = {"_SWARM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(position)}
        return CliRunner().invoke(command.app, [], prog_name="swarm", env=asked).stdout.split()

    assert completed("swarm va", 1) == ["validate"]
    assert completed("swarm init --templ", 2) == ["--template"]
    assert "slow-links" in completed("swarm init --template s", 3)
