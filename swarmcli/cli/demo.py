"""`swarm demo`: a whole swarm on this machine, from the first peer to the last epoch.

    monitor ── trainer-1, trainer-2, client-mode auxiliary ── trainer-3 joins ── trainer-2 is killed ── the last epoch

Each peer is a process with a home of its own below the demo's directory; the demo learns what happens from their
journals and summaries, as anybody could who has their files.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from swarmcli.cli.console import out
from swarmcli.cli.peers import Overrides
from swarmcli.cli.processes import Child, Children
from swarmcli.errors import JournalError, SwarmError
from swarmcli.events import EpochAdvanced
from swarmcli.journal import JOURNAL_NAME, JournalReader
from swarmcli.recipe import load_recipe
from swarmcli.recipe.templates import SHIPPED
from swarmcli.words import format_duration, format_size

MARK = ".swarm-demo"  # a file that marks a directory as a demo's, so that the next demo may remove it
RECIPE = SHIPPED / "stdlib-lm.yaml"
SURVIVORS = ("monitor", "trainer-1", "trainer-3")
TOLD_EPOCHS = 5  # epochs between two lines about how it goes
CONTRIBUTED_EPOCHS = 3  # epochs of the newcomer before trainer-2 is killed


def demo(
    overrides: Overrides,
    recipe: Annotated[Path | None, typer.Argument(metavar="[RECIPE]", help="Default: one that needs no data.")] = None,
    directory: Annotated[Path, typer.Option(help="Where the peers of the demo leave journals and logs.")] = Path(
        "demo-run"
    ),
    web: Annotated[int, typer.Option(metavar="PORT", help="The port of the dashboard; 0: any free one.")] = 0,
    limit: Annotated[float, typer.Option(metavar="SECONDS", help="Give up after this time.")] = 300.0,
) -> None:
    """Train with a monitor, three trainers and an auxiliary on this machine; one of them is killed during the run.

    \b
    swarm demo
    swarm demo recipes/powersgd.yaml --web 8080
    """
    path = recipe or RECIPE
    loaded = load_recipe(path, overrides)
    if not loaded.max_epochs or loaded.max_epochs < 8:
        raise SwarmError(f"{path}: a demo needs max_epochs of 8 or more, to have a middle; add --set max_epochs=40")
    prepare(directory)
    began = time.monotonic()

    def say(text: str) -> None:
        out.print(f"{time.monotonic() - began:5.0f} s  {text}")

    played = Demo(path.resolve(), loaded.run_id, loaded.max_epochs, directory.resolve(), say, overrides, limit, web)
    checks = expectations(*played.perform(), loaded.max_epochs)
    for check in checks:
        out.print(f"{'✓' if check.holds else '✗'} {check.claim}  {check.detail}")
    out.print(
        f"\nthe demo took {format_duration(time.monotonic() - began)}; journals, logs and checkpoints are in "
        f"{directory}: `swarm log {directory}/trainer-1` shows what one of the peers went through"
    )
    if not all(check.holds for check in checks):
        raise typer.Exit(1)


def prepare(directory: Path) -> None:
    """Makes the directory anew. Removes only what an earlier demo made."""
    if directory.exists():
        if not (directory / MARK).exists() and any(directory.iterdir()):
            raise SwarmError(f"{directory} holds something that no demo made; name another with --directory")
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    (directory / MARK).touch()


class Demo:
    """One performance. `say` is told what happens; the peers leave their files in `directory`."""

    def __init__(
        self,
        recipe: Path,
        run_id: str,
        epochs: int,
        directory: Path,
        say: Callable[[str], None],
        overrides: Sequence[str] = (),
        limit_seconds: float = 300.0,
        web_port: int = 0,
    ) -> None:
        self._recipe, self._run_id, self._last, self._directory, self._say = recipe, run_id, epochs, directory, say
        self._overrides = [word for override in overrides for word in ("--set", override)]
        self._deadline, self._limit_seconds = time.monotonic() + limit_seconds, limit_seconds
        self._web_port = web_port
        self._actors: dict[str, Child] = {}
        self._killed = ""
        self._told_epoch = 0

    def perform(self) -> tuple[dict[str, dict[str, Any]], list[EpochAdvanced]]:
        """Plays all of it; returns the peers' summaries, and the epochs of trainer-1. Raises SwarmError with the last
        lines of a peer that failed."""
        with Children() as children:
            self._children = children
            contact = self._open()
            self._wait_for_epoch(max(2, self._last // 4))
            self._say("trainer-3 joins in the middle of the run")
            self._start("trainer-3", "join", "--peer", contact, "--host", "127.0.0.1", "--name", "trainer-3")
            self._wait(self._newcomer_has_contributed, "trainer-3 to contribute")
            first = self._contributions("trainer-3")[0]
            self._say(f"trainer-3 has downloaded the state and contributes since epoch {first.epoch}")
            self._actors["trainer-2"].kill()
            self._killed = "trainer-2"
            self._say("trainer-2 is killed with SIGKILL")
            self._wait_for_epoch(self._last)
            for name in ("trainer-1", "trainer-3", "auxiliary"):
                self._wait(lambda name=name: self._actors[name].returncode is not None, f"{name} to end")  # type: ignore[misc]
            self._actors["monitor"].ask_to_stop()
            self._wait(lambda: self._actors["monitor"].returncode is not None, "the monitor to end")
        files = {name: self._directory / name / "summary.json" for name in self._actors}
        return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}, self._epochs()

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
        return contact

    def _newcomer_has_contributed(self) -> bool:
        if len(self._contributions("trainer-3")) >= CONTRIBUTED_EPOCHS:
            return True
        if self._epoch() >= self._last:
            raise SwarmError(
                "the run was over before trainer-3 had found its place; give it more epochs, for example "
                f"--set max_epochs={4 * self._last}"
            )
        return False

    def _start(self, name: str, verb: str, *arguments: str) -> None:
        words = [verb, str(self._recipe), "--home", str(self._directory / name), *arguments, *self._overrides]
        self._actors[name] = self._children.start(name, words, self._directory / f"{name}.log")

    def _epochs(self, name: str = "trainer-1") -> list[EpochAdvanced]:
        try:
            with JournalReader(self._directory / name / JOURNAL_NAME) as journal:
                return journal.epochs(self._run_id)
        except JournalError:  # not there yet
            return []

    def _contributions(self, name: str) -> list[EpochAdvanced]:
        return [epoch for epoch in self._epochs(name) if epoch.own_samples > 0]

    def _epoch(self) -> int:
        epochs = self._epochs()
        return epochs[-1].epoch if epochs else 0

    def _wait_for_epoch(self, epoch: int) -> None:
        def reached() -> bool:
            epochs = self._epochs()
            if epochs and epochs[-1].epoch >= self._told_epoch + TOLD_EPOCHS:
                last = epochs[-1]
                self._told_epoch = last.epoch
                loss = "" if last.loss is None else f", loss {last.loss:.3f}"
                self._say(f"epoch {last.epoch} of {self._last}{loss}, {last.peers} peers in the average")
            return bool(epochs) and epochs[-1].epoch >= epoch

        self._wait(reached, f"epoch {epoch}")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            for name, child in self._actors.items():
                if child.returncode not in (None, 0) and name != self._killed:
                    told = f"{name} ended with exit code {child.returncode}; its last words:\n{child.last_words()}"
                    raise SwarmError(told)
            if time.monotonic() > self._deadline:
                raise SwarmError(f"the demo waited for {what} and gave up after {self._limit_seconds:.0f} s in all")
            time.sleep(0.2)


class Expectation(NamedTuple):
    """Something that must be true at the end."""

    claim: str
    holds: bool
    detail: str = ""


def expectations(
    summaries: Mapping[str, Mapping[str, Any]], epochs: Sequence[EpochAdvanced], last: int
) -> list[Expectation]:
    """Returns what must be true at the end, and whether it is, from the peers' summaries and the epochs of
    trainer-1."""
    survivors = {name: summaries.get(name, {}) for name in SURVIVORS}
    digests = {name: str(each.get("digest", "")) for name, each in survivors.items()}
    reached = {name: each.get("epoch") for name, each in survivors.items()}
    losses = [epoch.loss for epoch in epochs if epoch.loss is not None]
    newcomer = survivors["trainer-3"]
    samples = newcomer.get("samples", 0)
    after = [epoch for epoch in epochs if epoch.peers and epoch.epoch >= last]
    reduced = summaries.get("auxiliary", {}).get("bytes_received", 0)
    return [
        Expectation(
            "all survivors hold bit-identical parameters",
            len(set(digests.values())) == 1 and all(digests.values()),
            ", ".join(f"{name} {digest[:12] or 'none'}" for name, digest in digests.items()),
        ),
        Expectation(
            f"all survivors reached epoch {last}",
            set(reached.values()) == {last},
            ", ".join(f"{name} {epoch}" for name, epoch in reached.items()),
        ),
        Expectation(
            "the loss has clearly fallen",
            len(losses) > 1 and losses[-1] < 0.8 * losses[0],
            f"{losses[0]:.3f} → {losses[-1]:.3f}" if losses else "no loss",
        ),
        Expectation(
            "the newcomer downloaded the state and contributed",
            newcomer.get("downloads", 0) > 0 and samples > 0,
            f"{samples} samples",
        ),
        Expectation("the run went on after the SIGKILL", bool(after), f"to epoch {after[-1].epoch}" if after else ""),
        Expectation("the auxiliary reduced for the others", reduced > 0, f"{format_size(reduced)} received"),
    ]
