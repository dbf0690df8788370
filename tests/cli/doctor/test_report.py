"""The file for whoever helps holds what helps, and none of the secrets that lie where it looks."""

from __future__ import annotations

import getpass
import io
import json
import socket
import threading
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from swarmcli.cli import service
from swarmcli.cli.doctor import computer, peers, run, verb
from swarmcli.cli.doctor.finding import Check, Context, Finding
from swarmcli.cli.doctor.report import as_text, collect, masking
from swarmcli.cli.service import Launchd
from swarmcli.machine.registry import LocalPeer, LocalPeers
from swarmcli.network.identity import Identity
from swarmcli.recipe import Link
from swarmcli.recipe.run_key import RunKey
from swarmcli.recipe.ticket import Ticket
from tests.cli.doctor.faults import OTHER, home_with
from tests.cli.typed import typed
from tests.recipe.recipes import SMALL

PEER = Identity.from_seed(1).peer_id
TICKET = Ticket.for_bearer(OTHER.peer_id, *RunKey(OTHER.private_key).invite_bearer("a" * 32, PEER, 4_000_000_000))
LINK = str(Link(PEER, ("203.0.113.7:31330", "peer.example.org:1"), "small", "a" * 32, TICKET))
LIMITED = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345"
SECRETS = {
    "invitation": TICKET.encode(),
    "fingerprint and peer id": PEER.text,
    "host": "peer.example.org",
    "its address": "203.0.113.7",
    "address of another": "198.51.100.23",
    "address of version 6": "2001:db8::77",
    "name of another computer": "ada-laptop",
    "token of the registry": "Zk3vQ0-uT_ab9XyZ-w0rD4cUmEnT1234",
    "token of the dashboard": "d4shb0ard-T0ken_abcdefg",
    "token of the Hub": LIMITED,
    "password": "correcthorse",
    "variable": "opensesame-and-more",
    "mail": "ada@example.org",
    "user": "lovelace",
}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A context in which every secret stands wherever a report looks."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MY_SERVICE_TOKEN", SECRETS["variable"])
    monkeypatch.setattr(socket, "gethostname", lambda: "ada-laptop")
    monkeypatch.setattr(getpass, "getuser", lambda: "lovelace")
    monkeypatch.setattr(service, "manager", Launchd)
    everything = " and ".join(
        (
            f"dialed tcp://198.51.100.23:31330/{PEER.text} of ada-laptop and [2001:db8::77]:5 for lovelace",
            f"join with {LINK}",
            f"http://127.0.0.1:8080/?token={SECRETS['token of the registry']}",
            f"Authorization: Bearer {SECRETS['token of the dashboard']}",
            f"HF_TOKEN={LIMITED} ada@example.org password: correcthorse {SECRETS['variable']} in {tmp_path}/x",
        )
    )
    home = home_with(tmp_path / "data", text=everything)
    (home / "dashboard.token").write_text(SECRETS["token of the dashboard"])
    (home.parent.parent / "invitation").write_text(TICKET.encode())
    (home / "contacts.json").write_text('["tcp://peer.example.org:1"]')
    log = service.log_file("small")
    log.write_text((home / "identity.key").read_text() + everything + "\n")
    agent = Launchd().file("small")
    agent.parent.mkdir(parents=True)
    agent.write_text("")
    LocalPeers().write(LocalPeer.here("trainer", "small", home), SECRETS["token of the registry"])
    (tmp_path / "small.yaml").write_text(SMALL + "network: {initial_peers: ['tcp://peer.example.org:1']}\n")
    context = Context(target=LINK, peers=["tcp://198.51.100.23:1"])
    list(run.check_recipe(context))
    list(peers.find_homes(context))
    return context


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_secret_is_in_a_report_wherever_it_stood(planted: Context, tmp_path: Path, form: str) -> None:
    said = [
        Finding("contact", "FAIL", f"{secret} ({what})", f"ask {secret}")
        for what, secret in SECRETS.items()
        if what not in ("password", "mail")
    ]
    said.append(Finding("odd", "FAIL", f"in {tmp_path}: 22:15:03 of {LINK}, token={LIMITED}", "chmod 600"))
    report = collect(planted, said)
    text = as_text(report) if form == "text" else json.dumps(report, indent=1)
    key = next(planted.homes[0].glob("identity.key")).read_text().splitlines()[1]
    found = {what for what, secret in {**SECRETS, "key": key, "home": str(tmp_path)}.items() if secret in text}
    assert not found
    # What helps is there all the same.
    helps = ("22:15:03", "chmod 600", "~/data/a-run-abcdefgh", "dialed tcp://(address):31330", PEER.short, "torch")
    assert all(words in text for words in helps)


def test_what_is_masked_and_what_is_not() -> None:
    for plain in (
        "at 12:34:56 in 1.25 s, version 2.13.0+cpu",
        "listening on 127.0.0.1:80 and [::1]:80",
        "swarmcli.averaging.round.program",
    ):
        assert masking()(plain) == plain
    for text, masked in (
        ("relay://[fe80::1%eth0]:7/x", "relay://(address):7"),
        ("-----BEGIN PRIVATE KEY-----\nabc", "(a key)"),
        ("from fe80::1%eth0 to 10.0.0.7", "from (address) to (address)"),
        ('{"token": "abcd1234"}', '{"token": "…"}'),
    ):
        assert masking()(text) == masked


def test_the_verb_ends_with_1_on_a_failure_and_writes_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "manager", Launchd)
    monkeypatch.setenv("HOME", str(tmp_path))
    outcomes = ["OK", "FAIL"]
    check = Check("odd", lambda context: [Finding("odd", each, "found", "mend it") for each in outcomes])  # type: ignore[arg-type]
    monkeypatch.setattr(verb, "CHECKS", (check, Check("homes", peers.find_homes), Check("clock", computer.check_clock)))
    doctor = typed(verb.doctor)
    done = doctor("--report", code=1)
    assert done.stdout.startswith("OK    odd: found\nFAIL  odd: found\n      → mend it\n")
    (file,) = tmp_path.glob("swarm-report-*.txt")
    assert "odd: found" in file.read_text()
    outcomes.remove("FAIL")
    done = doctor("--json", "-o", "found.json")
    assert json.loads(done.stdout.splitlines()[0])["outcome"] == "OK"
    assert json.loads((tmp_path / "found.json").read_text())["findings"][0]["check"] == "odd"


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
