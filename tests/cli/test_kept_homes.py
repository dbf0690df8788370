"""Homes that the build 26d1bc3 left behind (tests/kept/homes/make.sh made them): each verb that looks into a home reads
them."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from swarmcli.cli import main as command
from swarmcli.dht import DHT
from swarmcli.errors import BootstrapError, SwarmError
from swarmcli.run import asking

ARCHIVE = Path(__file__).parent.parent / "kept" / "homes" / "homes.tar.xz"
OPEN = ("runs/small/monitor-1", "runs/small/trainer-1", "data/small-k5f4bcs3/small/trainer-1")
CLOSED = ("runs/lab/monitor-1", "runs/lab/trainer-1", "data/lab-25aouvlm/lab/trainer-1")


@pytest.fixture(autouse=True)
def old(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The computer on which they lie."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(here, filter="data")
    return here


def swarm(*words: str, code: int = 0) -> Result:
    done = CliRunner().invoke(command.app, list(words))
    if isinstance(done.exception, SwarmError):
        raise done.exception
    assert done.exit_code == code, (done.output, done.exception)
    return done


@pytest.mark.parametrize("home", OPEN + CLOSED)
def test_log_and_export_read_what_a_peer_went_through(home: str) -> None:
    run = "small" if home in OPEN else "lab"
    said = swarm("log", home).stdout
    assert said.startswith(f"{run}  {'monitor' if 'monitor' in home else 'trainer'} ") and ": done" in said
    rows = [json.loads(line) for line in swarm("log", home, "--epochs", "--peers", "--json").stdout.splitlines()]
    assert max(row["epoch"] for row in rows if row["table"] == "epochs") == (12 if run == "small" else 6)
    assert {row["role"] for row in rows if row["table"] == "peers"} <= {"trainer", "monitor"}
    assert "  connected to " in swarm("log", home, "--events").stdout
    for what in ("epochs", "evaluations", "rounds", "peers", "events"):
        header, *lines = swarm("export", home, "--what", what).stdout.splitlines()
        assert "time" in header.split(",") and (lines or what in ("evaluations", "rounds", "peers"))


def test_of_all_that_lie_here_each_is_found_by_the_name_of_its_run_its_recipe_and_its_link() -> None:
    said = swarm("link").stdout
    small, lab = (next(line for line in said.splitlines() if f"/{run}" in line) for run in ("small", "lab"))
    for what in ("small", "small.yaml", small.split('"')[1]):
        assert swarm("log", what).stdout.startswith("small  monitor")
        assert swarm("link", what, "--copyable").stdout.startswith("swarm://")
    assert swarm("log", "lab").stdout.startswith("lab  monitor") and lab
    with pytest.raises(SwarmError, match="peers of 2 runs are known here"):
        swarm("link", "--copyable")


def test_status_and_limits_say_that_nobody_runs_and_what_would_hold() -> None:
    assert "no peer of yours runs on this computer" in swarm("status").stdout
    said = swarm("limits", "show").stdout
    assert "upload          5 MB/s" in said and "processor       50%" in said


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for contacts that are gone."""
    monkeypatch.setattr(asking, "DHT", lambda contacts, **how: DHT(contacts, **how | {"startup_timeout": 0.5}))


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("run", ["small", "lab"])
def test_members_and_certificates_ask_those_whom_the_peer_knew_who_are_gone(run: str) -> None:
    with pytest.raises(SwarmError) as nobody:
        swarm("members", run)
    assert "127.0.0.1" in str(getattr(nobody.value, "attempts", nobody.value))


@pytest.mark.usefixtures("hasty")
def test_a_certificate_is_written_by_the_word_that_the_home_has_kept() -> None:
    done = swarm("certificate", "--home", OPEN[1], "--for", "Ada Lovelace", "--out", "ada.json")
    assert "could not be asked" in done.stderr and "Ada Lovelace" in done.stdout
    assert "claimed" in swarm("certificate", "verify", "ada.json").stdout


def test_doctor_finds_keys_invitations_and_journals_in_order() -> None:
    done = CliRunner().invoke(command.app, ["doctor", "--json"])
    found = [json.loads(line) for line in done.stdout.splitlines()]
    told = {each["check"]: each["text"] for each in found if each["outcome"] == "OK"}
    assert told["identity"] == "6 keys in order" and told["journal"] == "6 journals intact"
    assert told["membership"] == "3 invitations in order"
    assert not [each for each in found if each["outcome"] == "FAIL" and each["check"] == "homes"]


@pytest.mark.parametrize("run", ["small", "lab"])
def test_who_joined_by_a_link_hears_that_fingerprints_have_changed_and_keeps_all_that_is_his(run: str) -> None:
    (home,) = Path("data").glob(f"{run}-*/{run}/trainer-1")
    before = {file: file.read_bytes() for file in home.parent.parent.rglob("*") if file.is_file()}
    done = CliRunner().invoke(command.app, ["join", (home / "link").read_text().splitlines()[0]])
    assert isinstance(done.exception, BootstrapError)
    assert "`swarm link` prints it" in " ".join(done.stderr.split())
    assert f"swarm join NEW-LINK --home {home.absolute()}" in done.stderr.splitlines()[-1]
    assert {file: file.read_bytes() for file in home.parent.parent.rglob("*") if file.is_file()} == before
