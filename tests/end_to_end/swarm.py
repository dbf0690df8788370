"""Real processes of a small run, for tests: started with a recipe of their own, looked at through their journals."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swarmcli.cli.processes import Child, Children
from swarmcli.errors import JournalError
from swarmcli.events import EpochAdvanced, RoundFinished
from swarmcli.journal import JOURNAL_NAME, JournalReader, Line

PATIENCE_SECONDS = 240.0  # for a machine that is busy with other tests; nothing here takes long by itself

RECIPE = """
run_id: test-run
base_model:
  model_type: gpt2
  n_layer: 1
  n_head: 2
  n_embd: 32
  resid_pdrop: 0.0
  embd_pdrop: 0.0
  attn_pdrop: 0.0
datasets:
  - source: files
    path: text
sequence_len: 32
target_batch_size: {target}
micro_batch_size: 8
max_epochs: {max_epochs}
seed: 3
output_dir: runs
optimizer:
  learning_rate: {rate}
local:
  host: {host}
"""
TEXT = "".join(f"The {n}th peer of the swarm knows that {n} and {n} are {2 * n}.\n" for n in range(3000))


class Swarm:
    """The processes of one test in one directory. Use inside `Children`, which lets none of them outlive the test."""

    def __init__(
        self, directory: Path, children: Children, *, max_epochs: int, target: int = 256, host: str = "127.0.0.1"
    ) -> None:
        self.directory = directory
        self.children = children
        self.recipe = directory / "recipe.yaml"
        # The recipe of each test has a fingerprint of its own, so that a peer that looks for its run on this computer
        # does not find another test's.
        rate = 3e-3 + 1e-12 * (1 + zlib.crc32(str(directory).encode()) % 997)
        self.recipe.write_text(RECIPE.format(max_epochs=max_epochs, target=target, host=host, rate=rate))
        (directory / "text").mkdir()
        (directory / "text" / "lines.txt").write_text(TEXT)
        self.contact = ""

    def home(self, name: str) -> Path:
        return self.directory / name

    def start(
        self,
        verb: str,
        name: str,
        *arguments: str,
        recipe: Path | str | None = None,
        launcher: Sequence[str] = (),
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Starts a peer, whose first contact is the latest peer of `start_contact`, if there was one. Its files are in
        `home(name)`, its output in `<name>.log`. `recipe` may be a link."""
        contact = ["--peer", self.contact] if self.contact else []
        words = [verb, str(recipe or self.recipe), "--home", str(self.home(name)), "--name", name, *contact, *arguments]
        log = self.directory / f"{name}.log"
        return self.children.start(name, words, log, environment, launcher=launcher, prefix=prefix)

    def start_monitor(self, *arguments: str, name: str = "monitor") -> Child:
        return self.start_contact("monitor", name, "--port", "0", "--web", "0", *arguments)

    def start_contact(
        self,
        verb: str,
        name: str,
        *arguments: str,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Starts a peer, waits until it is up, and makes it the first contact of those that are started later."""
        child = self.start(verb, name, *arguments, prefix=prefix, environment=environment)
        self.wait(lambda: (self.home(name) / "peer.json").exists(), f"{name} is up", child)
        self.contact = self.told(name)["addresses"][0]
        return child

    def told(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.home(name) / "peer.json").read_text()))

    def summary(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.home(name) / "summary.json").read_text()))

    def epochs(self, name: str, *, after: int = -1) -> list[EpochAdvanced]:
        return self._read(name, lambda journal: journal.epochs("test-run", after=after))

    def lives(self, name: str) -> list[float]:
        """The times at which this peer was started, oldest first, in seconds since 1970."""
        return self._read(name, lambda journal: [each.started for each in journal.runs()])

    def rounds(self, name: str) -> list[RoundFinished]:
        return self._read(name, lambda journal: journal.rounds("test-run"))

    def events(self, name: str) -> list[Line]:
        return self._read(name, lambda journal: journal.events("test-run"))

    def _read(self, name: str, what: Callable[[JournalReader], list[Any]]) -> list[Any]:
        try:
            with JournalReader(self.home(name) / JOURNAL_NAME) as journal:
                return what(journal)
        except JournalError:  # not there yet
            return []

    def epoch(self, name: str) -> int:
        epochs = self.epochs(name)
        return epochs[-1].epoch if epochs else 0

    def wait(self, condition: Callable[[], bool], what: str, *alive: Child) -> None:
        """Waits until the condition holds. Fails after PATIENCE_SECONDS, or once one of the `alive` has ended with an
        error."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            for child in alive:
                assert child.returncode in (None, 0), (
                    f"{child.name} ended while waiting: {what}\n{child.last_words(40)}"
                )
            assert time.monotonic() < deadline, f"waited in vain: {what}\n{self.last_words()}"
            poll()

    def wait_for_epoch(self, name: str, epoch: int, *alive: Child) -> None:
        self.wait(lambda: self.epoch(name) >= epoch, f"{name} is at epoch {epoch}", *alive)

    def wait_for_end(self, child: Child, code: int = 0) -> None:
        self.wait(lambda: child.returncode is not None, f"{child.name} ends")
        assert child.returncode == code, child.last_words(40)

    def end_in_step(self, *trainers: Child) -> None:
        """Asks the trainers to stop once all have gone through the same rounds. Fails if they never have, or if
        trainers that end after the same rounds have unlike parameters."""

        def in_step() -> bool:
            lineages = [self._lineages(trainer) for trainer in trainers]
            shared = set(lineages[0]).intersection(*lineages[1:])
            return bool(shared) and len({of_one[max(shared)] for of_one in lineages}) == 1

        self.wait(in_step, "all are in step", *trainers)  # a trainer that missed a round catches up
        for trainer in trainers:
            trainer.ask_to_stop()
        for trainer in trainers:
            self.wait_for_end(trainer)
        ends = {self._end(trainer) for trainer in trainers}
        assert len({lineage for lineage, _ in ends}) == len(ends), self.last_words()

    def _end(self, trainer: Child) -> tuple[str, str]:
        """The lineage at which the trainer ended, and the digest of its parameters there."""
        summary = self.summary(trainer.name)
        return self._lineages(trainer)[summary["epoch"]], summary["digest"]

    def _lineages(self, trainer: Child) -> dict[int, str]:
        return {each.epoch: each.lineage for each in self.epochs(trainer.name)}

    def last_words(self) -> str:
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-15:]) for log in logs)


def poll() -> None:
    """Waits a moment between two looks at another process, which no virtual clock reaches."""
    time.sleep(0.1)
