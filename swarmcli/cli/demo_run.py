"""The story of the demo: who is started when, what has to happen before the next step, what must be true at the end.

    monitor ── trainer-1, trainer-2, client-mode auxiliary ── trainer-3 joins ── trainer-2 is killed ── the last epoch

Every actor is a process of its own with a home of its own below the demo's directory; the demo learns what happens
from their journals, as anybody could who has their files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmcli.cli.processes import Child, Children
from swarmcli.errors import JournalError, SwarmError
from swarmcli.events import EpochAdvanced, RoundFinished
from swarmcli.journal import JOURNAL_NAME, JournalReader
from swarmcli.words import format_size

ACTORS = ("monitor", "trainer-1", "trainer-2", "auxiliary", "trainer-3")


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """When the demo intervenes, as epochs."""

    newcomer_at: int
    last: int

    @classmethod
    def for_epochs(cls, epochs: int) -> DemoPlan:
        return cls(newcomer_at=max(2, epochs // 4), last=epochs)


@dataclass(frozen=True, slots=True)
class Expectation:
    """Something that must be true at the end."""

    claim: str
    holds: bool
    detail: str = ""


@dataclass(slots=True)
class ActorReport:
    """The deeds of one process, by its own journal and summary."""

    name: str
    role: str
    fate: str
    epochs: list[EpochAdvanced] = field(default_factory=list)
    rounds: list[RoundFinished] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return sum(epoch.own_samples for epoch in self.epochs)

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Sent and received in rounds, and in downloads where the process lived to tell."""
        if self.summary:
            return self.summary["bytes_sent"], self.summary["bytes_received"]
        return sum(r.bytes_sent for r in self.rounds), sum(r.bytes_received for r in self.rounds)

    @property
    def losses(self) -> list[float]:
        return [epoch.loss for epoch in self.epochs if epoch.loss is not None]


class DemoRun:
    """One performance. `say` is told what happens, `directory` keeps what the actors leave."""

    def __init__(
        self,
        recipe: Path,
        run_id: str,
        plan: DemoPlan,
        directory: Path,
        say: Callable[[str], None],
        *,
        overrides: Sequence[str] = (),
        limit_seconds: float = 300.0,
        web_port: int = 0,
    ) -> None:
        self._recipe = recipe
        self._run_id = run_id
        self._plan = plan
        self._directory = directory
        self._say = say
        self._overrides = [word for override in overrides for word in ("--set", override)]
        self._deadline = time.monotonic() + limit_seconds
        self._limit_seconds = limit_seconds
        self._web_port = web_port
        self._actors: dict[str, Child] = {}
        self._fates: dict[str, str] = {}
        self._told_epoch = 0

    def perform(self) -> list[ActorReport]:
        """Plays all of it. Raises SwarmError with the last words of an actor that failed its part."""
        with Children() as children:
            self._children = children
            contact = self._open()
            self._add_newcomer(contact)
            self._kill_one()
            self._finish()
        return [self.report(name) for name in ACTORS]

    def _open(self) -> str:
        self._start("monitor", "monitor", "--port", "0", "--web", str(self._web_port), "--host", "127.0.0.1")
        peer_file = self._directory / "monitor" / "peer.json"
        self._wait(peer_file.exists, "the monitor to come up")
        told = json.loads(peer_file.read_text())
        contact = str(told["addresses"][0])
        self._say(f"the monitor is up; watch the run at {told['dashboard']}")
        for name in ("trainer-1", "trainer-2"):
            self._start(name, "join", "--peer", contact, "--host", "127.0.0.1", "--name", name)
        self._start("auxiliary", "aux", "--peer", contact, "--client-mode", "--name", "auxiliary")
        self._say("trainer-1, trainer-2 and an auxiliary in client mode are starting")
        self._wait_for_epoch(1)
        return contact

    def _add_newcomer(self, contact: str) -> None:
        self._wait_for_epoch(self._plan.newcomer_at)
        self._say("trainer-3 joins in the middle of the run")
        self._start("trainer-3", "join", "--peer", contact, "--host", "127.0.0.1", "--name", "trainer-3")
        self._wait(self._newcomer_has_contributed, "trainer-3 to contribute")
        first = self._contributions("trainer-3")[0]
        self._say(f"trainer-3 has downloaded the state and contributes since epoch {first.epoch}")

    def _newcomer_has_contributed(self) -> bool:
        if len(self._contributions("trainer-3")) >= 3:  # epochs, before somebody is killed
            return True
        if self._epoch() >= self._plan.last:
            raise SwarmError(
                "the run was over before trainer-3 had found its place; give it more epochs, for example "
                f"--set max_epochs={4 * self._plan.last}"
            )
        return False

    def _kill_one(self) -> None:
        self._actors["trainer-2"].kill()
        self._fates["trainer-2"] = f"killed, epoch {self._epoch()}"
        self._say("trainer-2 is killed with SIGKILL")

    def _finish(self) -> None:
        self._wait_for_epoch(self._plan.last)
        for name in ("trainer-1", "trainer-3", "auxiliary"):
            self._wait(lambda name=name: self._actors[name].returncode is not None, f"{name} to end")  # type: ignore[misc]
        self._actors["monitor"].ask_to_stop()
        self._wait(lambda: self._actors["monitor"].returncode is not None, "the monitor to end")

    def _start(self, name: str, verb: str, *arguments: str) -> None:
        home = self._directory / name
        words = [verb, str(self._recipe), "--home", str(home), *arguments, *self._overrides]
        self._actors[name] = self._children.start(name, words, self._directory / f"{name}.log")

    # what the journals say

    def _read(self, name: str) -> tuple[list[EpochAdvanced], list[RoundFinished]]:
        try:
            with JournalReader(self._directory / name / JOURNAL_NAME) as journal:
                return journal.epochs(self._run_id), journal.rounds(self._run_id)
        except JournalError:  # not there yet
            return [], []

    def _contributions(self, name: str) -> list[EpochAdvanced]:
        return [epoch for epoch in self._read(name)[0] if epoch.own_samples > 0]

    def _epoch(self) -> int:
        epochs = self._read("trainer-1")[0]
        return epochs[-1].epoch if epochs else 0

    def report(self, name: str) -> ActorReport:
        epochs, rounds = self._read(name)
        summary_file = self._directory / name / "summary.json"
        summary = json.loads(summary_file.read_text()) if summary_file.exists() else {}
        code = self._actors[name].returncode
        fate = self._fates.get(name) or ("done" if code == 0 else f"exit code {code}")
        return ActorReport(name, name.partition("-")[0], fate, epochs, rounds, summary)

    # waiting

    def _wait_for_epoch(self, epoch: int) -> None:
        def reached() -> bool:
            self._tell_progress()
            return self._epoch() >= epoch

        self._wait(reached, f"epoch {epoch}")

    def _tell_progress(self) -> None:
        epochs = self._read("trainer-1")[0]
        if epochs and epochs[-1].epoch >= self._told_epoch + 5:
            last = epochs[-1]
            self._told_epoch = last.epoch
            loss = "" if last.loss is None else f", loss {last.loss:.3f}"
            self._say(f"epoch {last.epoch} of {self._plan.last}{loss}, {last.peers} peers in the average")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            for name, child in self._actors.items():
                if child.returncode not in (None, 0) and name not in self._fates:
                    told = f"{name} ended with exit code {child.returncode}; its last words:\n{child.last_words()}"
                    raise SwarmError(told)
            if time.monotonic() > self._deadline:
                raise SwarmError(f"the demo waited for {what} and gave up after {self._limit_seconds:.0f} s in all")
            time.sleep(0.2)


def expectations(actors: Sequence[ActorReport], plan: DemoPlan) -> list[Expectation]:
    """All that is expected at the end, found true or false."""
    by_name = {actor.name: actor for actor in actors}
    survivors = [
        actor for actor in actors if actor.role in ("trainer", "monitor") and not actor.fate.startswith("killed")
    ]
    digests = {actor.name: actor.summary.get("digest", "") for actor in survivors}
    reached = {actor.name: actor.summary.get("epoch") for actor in survivors}
    losses = by_name["trainer-1"].losses
    newcomer = by_name["trainer-3"]
    after = [epoch for epoch in by_name["trainer-1"].epochs if epoch.peers and epoch.epoch >= plan.last]
    reduced = by_name["auxiliary"].bytes_moved[1]
    return [
        Expectation(
            "all survivors hold bit-identical parameters",
            len(set(digests.values())) == 1 and all(digests.values()),
            ", ".join(f"{name} {digest[:12] or 'none'}" for name, digest in digests.items()),
        ),
        Expectation(
            f"all survivors reached epoch {plan.last}",
            set(reached.values()) == {plan.last},
            ", ".join(f"{name} {epoch}" for name, epoch in reached.items()),
        ),
        Expectation(
            "the loss has clearly fallen",
            len(losses) > 1 and losses[-1] < 0.8 * losses[0],
            f"{losses[0]:.3f} → {losses[-1]:.3f}" if losses else "no loss",
        ),
        Expectation(
            "the newcomer downloaded the state and contributed",
            newcomer.summary.get("downloads", 0) > 0 and newcomer.samples > 0,
            f"{newcomer.samples} samples",
        ),
        Expectation("the run went on after the SIGKILL", bool(after), f"to epoch {after[-1].epoch}" if after else ""),
        Expectation("the auxiliary reduced for the others", reduced > 0, f"{format_size(reduced)} received"),
    ]
