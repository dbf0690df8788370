"""Roles of a run in one process, each in a thread of its own, with a task that needs no library."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swarmcli.events import EpochAdvanced, Event, Noticed
from swarmcli.peer.home import Home
from swarmcli.peer.joining import join_run
from swarmcli.peer.lifetime import run_auxiliary, run_monitor, run_trainer
from swarmcli.peer.peer import RunPeer
from swarmcli.run.watch import RunWatch
from swarmcli.training import CheckpointStore
from tests.recipe.recipes import small

PATIENCE = 200.0  # seconds, for a busy machine


class Sums:
    """A task that needs no library: the sum of eight numbers."""

    def build_model(self, *, outline: bool = False) -> nn.Module:
        model, own = nn.Linear(8, 1), torch.Generator().manual_seed(1)  # roles in other threads draw at the same time
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-0.35, 0.35, generator=own)
        return model

    def batches(self, seed: int, position: Mapping[str, Any] | None = None) -> SumsStream:
        return SumsStream(seed, position["drawn"] if position else 0)

    def save_preprocessing(self, directory: Path) -> None:
        """It needs nothing beside the model."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        features = batch["features"]
        return nn.functional.mse_loss(model(features), features.sum(1, keepdim=True))


class SumsStream:
    """Batches of a task of sums."""

    def __init__(self, seed: int, drawn: int) -> None:
        self.seed, self.drawn = seed, drawn

    def __iter__(self) -> SumsStream:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        self.drawn += 1
        return {"features": torch.randn(8, 8, generator=torch.Generator().manual_seed(self.seed + self.drawn))}

    def position(self) -> Mapping[str, Any]:
        return {"drawn": self.drawn}


class Peer:
    """A role in a thread of its own. `peer` is there when it is known to the network."""

    def __init__(self, directory: Path, name: str, pool: ThreadPoolExecutor, *contacts: Peer, **options: Any) -> None:
        self.home = directory / name
        self.stop = threading.Event()
        self.events: list[Event] = []
        self._changed = threading.Condition()
        self.peer: RunPeer | None = None
        addresses = [address for contact in contacts for address in contact.addresses]
        self._done: Future[None] = pool.submit(self._run, name, addresses, **options)
        self._done.add_done_callback(self._tell)
        self.until(lambda: self.peer is not None or self._done.done())

    def _run(
        self,
        name: str,
        contacts: list[str],
        role: str = "trainer",
        settings: tuple[str, ...] = (),
        begins_anew: bool = False,
        **how: Any,
    ) -> None:
        own = [f"local.name={name}", "local.device=cpu", "local.host=127.0.0.1", f"output_dir={self.home.parent}"]
        recipe = small("target_batch_size=64", *own, *settings)
        run: Any = {"monitor": run_monitor, "trainer": run_trainer, "auxiliary": run_auxiliary}[role]
        with (
            Home.at(self.home) as home,
            join_run(recipe, role, home, contacts=contacts, listener=self._hear, begins_anew=begins_anew) as peer,  # type: ignore[arg-type]
        ):
            watch = RunWatch(peer)
            with self._changed:
                self.peer, self.watch = peer, watch
                self._changed.notify_all()
            try:
                run(peer, watch, self.stop, **how)
            finally:
                watch.close()

    def _hear(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def _tell(self, done: Future[None]) -> None:
        """What failed ends the waits as well."""
        with self._changed:
            self._changed.notify_all()

    def until(self, condition: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE), "it never came true"

    def reach(self, epoch: int) -> None:
        self.until(lambda: self.epoch >= epoch or self._done.done())
        assert self.epoch >= epoch, self._done.result()

    @property
    def epoch(self) -> int:
        return max((each.epoch for each in self.epochs), default=0)

    @property
    def epochs(self) -> list[EpochAdvanced]:
        return [event for event in self.events if isinstance(event, EpochAdvanced)]

    @property
    def addresses(self) -> list[str]:
        assert self.peer is not None, self._done.result()
        return self.peer.dht.get_visible_addresses()[:1]

    @property
    def notices(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Noticed)]

    def leave(self) -> str:
        """Asks it to leave, waits for that, and returns what it says about its state."""
        self.stop.set()
        return self.end()

    def end(self) -> str:
        self._done.result(PATIENCE)
        assert self.peer is not None
        return self.peer.saved

    def leave_saved(self) -> Path:
        """Where a peer that leaves now has saved its state."""
        return Path(self.leave().rpartition(" at ")[2])

    @property
    def saved(self) -> list[int]:
        """The epochs of the checkpoints in its home."""
        return [int(path.name[6:]) for path in CheckpointStore(self.home / "checkpoints", "small").checkpoints.all()]


@contextmanager
def run(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes peers, and ends those that are left."""
    monkeypatch.setattr("swarmcli.peer.collaboration.build_task", lambda recipe: Sums())
    made: list[Peer] = []
    with ThreadPoolExecutor(8) as pool:

        def start(name: str, *contacts: Peer, **options: Any) -> Peer:
            made.append(Peer(directory, name, pool, *contacts, **options))
            return made[-1]

        try:
            yield start
        finally:
            for peer in made:
                peer.stop.set()
