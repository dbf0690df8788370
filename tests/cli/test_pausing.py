"""`swarm status`, `pause`, `resume` and `stop`, against peers that answer as real ones do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from coordinator_web.app import create_app
from swarmcli.cli import pausing, status
from swarmcli.cli.main import app
from swarmcli.errors import ControlError, UsageError
from swarmcli.events import Reason
from swarmcli.machine.registry import LocalPeer, LocalPeers, birth_of
from swarmcli.peer.activity import Activity, PendingWork
from swarmcli.peer.controls import PeerControls
from swarmcli.recipe.limit_store import LimitStore
from tests.web.dashboards import Dashboard
from tests.web.fake_source import TRAINERS, FakeRun


class RunningPeer:
    """A peer of this user, of which only the API is real."""

    def __init__(self, name: str, until: ExitStack) -> None:
        self.activity = Activity()
        self.stops: list[str] = []
        self.ended = threading.Event()  # at once, whatever was under way
        self.run = FakeRun(3)
        controls = PeerControls(
            self.activity, LimitStore(), lambda: self._stop(), seat=lambda: self.run.seat,
            end_process=lambda code: self.ended.set(),
        )  # fmt: skip
        server = Dashboard(create_app(self.run, controls=controls, control_token=name))  # type: ignore[arg-type]
        self.entry = until.enter_context(
            LocalPeers().entered(LocalPeer.here("trainer", "a-run", Path(f"/homes/{name}")))
        )
        self.entry.announce(name=name, api=server.url.rstrip("/"), token=name)
        until.callback(server.stop)

    def _stop(self) -> None:
        """As a peer leaves: its entry goes."""
        self.stops.append("asked")
        for file in LocalPeers().directory.iterdir():
            file.unlink()


@pytest.fixture
def registry() -> LocalPeers:
    return LocalPeers()


@pytest.fixture
def ada(registry: LocalPeers) -> Iterator[RunningPeer]:
    with ExitStack() as until:
        yield RunningPeer("Ada", until)


def swarm(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def test_where_nobody_runs_that_is_said(registry: LocalPeers) -> None:
    code, out, err = swarm("status")
    assert (code, out.strip()) == (0, "no peer of yours runs on this computer")
    assert 'swarm join "swarm://…"' in err
    assert swarm("status", "--json")[:2] == (0, "[]\n")
    assert swarm("status", "-q")[2] == ""
    for verb in ("pause", "resume", "stop"):
        with pytest.raises(ControlError, match="no peer of yours runs on this computer; join a run with"):
            swarm(verb)


def test_status_tells_what_each_does(ada: RunningPeer) -> None:
    code, out, _ = swarm("status")
    assert code == 0
    assert out.startswith("Ada, trainer of a-run, since ")
    assert "epoch 3 of 200" in out and "4 trainers" in out and "files  /homes/Ada" in out
    (told,) = json.loads(swarm("status", "--json")[1])
    assert (told["name"], told["state"]["run"]["epoch"]) == ("Ada", 3)
    assert told["page"] == f"{ada.entry.peer.api}/?token=Ada"
    ada.run.people = [replace(TRAINERS[0], me=True), TRAINERS[1]]
    assert "place 1 of 2" in swarm("status")[1]
    ada.run.people.pop()
    assert "number" not in swarm("status")[1], "who is alone has no place"


def test_status_says_that_the_run_stands_and_that_samples_cannot_count(ada: RunningPeer) -> None:
    ada.run.state, ada.run.waits = "standing", "The run stands still: epoch 3 has lasted 30 s."
    ada.run.people = [replace(each, samples_per_second=0.0) for each in ada.run.people]
    out = swarm("status")[1]
    assert (
        "Waiting: the run stands still, epoch 3 of 200" in out
        and "  waits  The run stands still: epoch 3 has lasted" in out
    )
    assert "samples a second" not in out and "Training" not in out and "alarm" not in out
    ada.run.state, ada.run.waits, ada.run.seat = "following", "", "a round sends 1.8 MB; your samples cannot count here"
    ada.run.people[0] = replace(ada.run.people[0], health="line too slow")
    out = swarm("status")[1]
    assert "Computing nothing: your samples cannot count" in out and "1 of them computing nothing" in out
    assert "  slow   a round sends 1.8 MB; your samples cannot count here" in out
    told = swarm("limits", "set", "upload=10kB/s")[2]
    assert "Ada (trainer of a-run): a round sends 1.8 MB; your samples cannot count here" in told


def test_one_that_joins_or_does_not_answer_is_shown_too(registry: LocalPeers, monkeypatch: pytest.MonkeyPatch) -> None:
    with registry.entered(LocalPeer.here("monitor", "a-run", Path("/homes/monitor-1"))) as entry:
        assert "monitor-1, monitor of a-run" in swarm("status")[1] and "Joining the run" in swarm("status")[1]
        entry.announce(name="Bob", api="http://127.0.0.1:1", token="x")  # where nobody listens
        assert "Bob (process" in swarm("status")[1] and "does not answer" in swarm("status")[1]
        monkeypatch.setattr(status.client, "get", lambda *args, **options: {"of": "another version"})
        assert "This version of swarm cannot show" in swarm("status")[1]


def test_pause_and_resume(ada: RunningPeer) -> None:
    code, out, err = swarm("pause")
    assert (code, out) == (0, "") and "Ada (trainer of a-run): pausing" in err
    assert ada.activity.status().reasons[0].until is None
    swarm("pause", "--for", "2h", "--quiet")
    assert ada.activity.status().reasons[0].until == pytest.approx(ada.activity.status().since + 7200, abs=60)
    (told,) = json.loads(swarm("pause", "--until", "tomorrow 8:00", "--json")[1])
    assert told["activity"]["state"] == "pausing" and told["peer"] == "Ada"
    code, _, err = swarm("resume")
    assert code == 0 and ada.activity.status().state == "running" and err == "Ada (trainer of a-run): running\n"
    ada.activity.hold(Reason("battery", "on battery"))
    assert "still pausing: on battery" in swarm("resume")[2]
    ada.activity.release("battery")
    for words in (["--peer", "Ada"], ["--home", "/homes/Ada"], ["--run", "a-run"]):
        assert swarm("pause", *words)[0] == 0
    with pytest.raises(ControlError, match=r"no peer of yours fits that; these run: Ada \(trainer of a-run\)"):
        swarm("pause", "--peer", "Bob")
    with pytest.raises(UsageError, match="give one of them"):
        swarm("pause", "--for", "2h", "--until", "18:00")


def test_stop_waits_until_it_has_left(ada: RunningPeer) -> None:
    code, _, err = swarm("stop")
    assert code == 0 and ada.stops == ["asked"] and ada.activity.status().state == "stopping"
    assert err.splitlines() == ["Ada (trainer of a-run): stopping", "Ada (trainer of a-run): has stopped"]
    with ExitStack() as until:
        other = RunningPeer("Bob", until)
        assert swarm("stop", "--now")[0] == 0
        assert other.activity.status().stays == 0 and other.ended.wait(60)


def test_who_has_not_left_in_time_is_named(ada: RunningPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pausing, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(ada, "_stop", lambda: None)
    monkeypatch.setattr(PeerControls, "stop", lambda self, now: None)
    code, out, _ = swarm("stop", "--json")
    (told,) = json.loads(out)
    assert code == 1 and told["stopped"] is False and "swarm stop --now` ends it" in told["error"]


@pytest.mark.parametrize(("hands_in_for", "waits"), [(0, 120), (180, 240), (1200, 720)])
def test_stop_waits_while_computed_samples_are_handed_in(
    ada: RunningPeer, monkeypatch: pytest.MonkeyPatch, hands_in_for: int, waits: int
) -> None:
    """`waits`: seconds after which one that has handed in, or should have, is given up."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += 60.0
        if now[0] >= hands_in_for:
            ada.activity.pending = PendingWork

    ada.activity.pending = lambda: PendingWork(1200 if hands_in_for else 0, 240.0)
    monkeypatch.setattr(ada, "_stop", lambda: None)
    monkeypatch.setattr(pausing, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    code, _, err = swarm("stop")
    first, *hint, last = err.splitlines()
    assert first.endswith("leaving: handing in, about 4 min left (1,200 samples)" if hands_in_for else "stopping")
    assert bool(hint) == bool(hands_in_for) and "it has not ended yet" in last
    assert (code, now[0]) == (1, waits)


@pytest.mark.parametrize("leaves", [True, False])
def test_one_that_has_hung_up_since_it_leaves_by_itself_has_stopped(
    ada: RunningPeer, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    def hung_up(*_: object, **__: object) -> None:
        if leaves:
            ada._stop()
        raise ControlError("does not answer")

    monkeypatch.setattr(pausing.client, "post", hung_up)
    monkeypatch.setattr(pausing, "ANSWER_SECONDS", 0.0)
    code, _, err = swarm("stop")
    assert (code, err.splitlines()[-1].partition("run): ")[2]) == (
        (0, "has stopped") if leaves else (1, "does not answer")
    )


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize(("words", "number"), [([], signal.SIGTERM), (["--now"], signal.SIGKILL)])
def test_one_that_cannot_be_asked_yet_gets_a_signal(registry: LocalPeers, words: list[str], number: int) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        peer = LocalPeer(process.pid, 1e9, "trainer", "a-run", "/homes/x", born=birth_of(process.pid))
        registry.write(peer, "")
        assert swarm("stop", *words)[0] == 0
        assert process.wait() == -number


def test_status_loads_nothing_that_it_does_not_need(registry: LocalPeers) -> None:
    heavy = {
        *("asyncio", "cryptography", "fastapi", "httpx", "numpy", "rich.console", "torch", "yaml"),
        *("swarmcli.cli.console", "swarmcli.events", "swarmcli.journal", "swarmcli.network", "swarmcli.recipe"),
    }
    code = (
        "import atexit, sys\nfrom swarmcli.cli.main import main\natexit.register(lambda: print(*sys.modules))\nmain()\n"
    )
    with registry.entered(LocalPeer.here("monitor", "a-run", Path("/homes/monitor-1"))):
        for words in (["status"], ["pause", "--for", "2h"]):
            done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
            assert "swarmcli.machine.client" in done.stdout
            assert not set(done.stdout.splitlines()[-1].split()) & heavy
