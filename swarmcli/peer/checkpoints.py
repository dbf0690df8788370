"""Checkpoints of one peer: written beside a run that does not wait for the disk, and when the peer leaves."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from swarmcli.checkpoints.directory import Keep
from swarmcli.checkpoints.layout import epoch_of, position_of
from swarmcli.errors import CheckpointError, DataError, SwarmError
from swarmcli.events import Evaluated, Events, Noticed
from swarmcli.files.durable import write_file
from swarmcli.optim import Optimizer
from swarmcli.optim.core import OptimizerCore
from swarmcli.peer.collaboration import Collaboration
from swarmcli.peer.disk import room_for
from swarmcli.peer.home import BEGAN
from swarmcli.peer.uploads import Uploads, hub
from swarmcli.sharding.zero.state import copied_to_cpu
from swarmcli.threads import on_all_threads, on_one_thread
from swarmcli.training import Batch, CheckpointStore, Compute
from swarmcli.training.adapters import is_adapted
from swarmcli.training.device import on_host
from swarmcli.training.loop import evaluate
from swarmcli.training.model_card import describe_model, model_card
from swarmcli.training.schedule import averages_in

ALONE = "no other peer in reach holds the model of this run"


def _at_present(collaboration: Collaboration) -> dict[str, Any]:
    """Returns what a model card tells beside what a checkpoint holds."""
    optimizer, began = collaboration.optimizer, collaboration.peer.home.path / BEGAN
    roles = [optimizer.report().role, *(report.role for report in optimizer.peers().values())]
    return {"trainers": roles.count("trainer"), "began": began.read_text(encoding="utf-8") if began.exists() else ""}


def write_card(collaboration: Collaboration, path: Path, measured: Evaluated) -> None:
    """Writes the model card of a checkpoint again, with what its model was evaluated at."""
    recipe = collaboration.peer.recipe
    with suppress(OSError, CheckpointError):  # the checkpoint may have been removed for a better one
        samples = position_of(path, recipe.run_id)[1]
        text = model_card(recipe, epoch_of(path), samples, measured=measured, **_at_present(collaboration))
        write_file(path / "README.md", text.encode())


def store_of(collaboration: Collaboration) -> CheckpointStore:
    """Returns the checkpoints in a peer's home, each with what the task needs beside the model, and a model card."""
    peer = collaboration.peer
    recipe, directory = peer.recipe, peer.home.path / "checkpoints"

    def describe(directory: Path, epoch: int, samples: int | None) -> None:
        describe_model(directory, recipe, collaboration.task, epoch, samples, **_at_present(collaboration))

    settings = recipe.checkpoint
    keep = Keep(settings.keep, settings.keep_every, settings.keep_best)

    def room() -> float:
        return room_for(peer.limits, recipe, peer.home.path)

    averages = partial(averages_in, recipe)
    return CheckpointStore(
        directory, recipe.run_id, keep=keep, events=peer.events, describe=describe, room=room, averages=averages
    )


class Evaluation:
    """Evaluates models on the run's data for that, which is read before the first evaluation."""

    def __init__(self, collaboration: Collaboration, stopped: Callable[[], bool]) -> None:
        """`stopped()`: whether the peer is leaving; an evaluation that is under way then ends without a result."""
        self.every = collaboration.peer.recipe.evaluation.every_epochs
        self.evaluations = collaboration.evaluations
        self._optimizer = collaboration.optimizer
        self._task = collaboration.task
        self._compute = collaboration.compute
        self._events = collaboration.peer.events
        self._stopped = stopped
        self._batches: Sequence[Batch] = ()
        self._told = ""

    def is_due(self, epoch: int) -> bool:
        """Whether this peer evaluates the model of this epoch for the run."""
        due = self.every > 0 and epoch % self.every == 0
        return due and self._optimizer.call(lambda core: self.evaluations.is_appointed())

    def __call__(self, model: nn.Module, epoch: int) -> Evaluated | None:
        """Evaluates, and tells the others. Returns None if the peer leaves meanwhile, or if the data cannot be read; a
        warning says so, once. Nobody else may use `model`."""
        try:
            self._batches = self._batches or self._task.evaluation_batches()
            result = self._measure(model, epoch)
        except (SwarmError, OSError, RuntimeError) as error:  # torch raises the last one
            if str(error) != self._told:
                self._told = str(error)
                self._events.emit(Noticed("warning", f"epoch {epoch} was not evaluated: {error}"))
            return None
        if result is None:
            return None

        def tell(core: OptimizerCore) -> None:
            core.metrics.note_evaluation(result.epoch, result.loss, result.samples, result.metrics)
            self.evaluations.note(result)
            core.directory.announce()

        self._optimizer.call(tell)
        return result

    def _measure(self, model: nn.Module, epoch: int) -> Evaluated | None:
        try:
            return evaluate(self._task, model, self._batches, self._compute, self._stopped, epoch)
        except torch.OutOfMemoryError:  # the device has no room for a second model beside the training
            if is_adapted(model):  # the base is shared with the training, and does not move
                raise
            self._compute = Compute(torch.device("cpu"))
            return evaluate(self._task, model, self._batches, self._compute, self._stopped, epoch)


class BackgroundCheckpoints:
    """Writes and evaluates a copy of the state every `every` epochs, in a thread of its own, and when the peer leaves
    the state that is not written yet.

    While one copy is being written or evaluated the next is left out: a slow disk, or a long evaluation, costs
    checkpoints and not rounds.
    """

    def __init__(
        self,
        store: CheckpointStore,
        model: nn.Module,
        optimizer: Optimizer,
        every: int,
        *,
        copy: Callable[[dict[str, Any]], dict[str, Any]] = copied_to_cpu,
        offers: bool = False,
        yields: bool = False,
        path: Path | None = None,
        events: Events | None = None,
        evaluation: Evaluation | None = None,
        card: Callable[[Path, Evaluated], object] = lambda path, measured: None,
        upload: Callable[[Path, float | None, bool], object] = lambda path, loss, best: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """To be made before the run is joined: what the optimizer holds now need not be written, since it is nothing or
        lies at `path`.

        `copy` copies the optimizer's state so that no step changes it. `offers`: others may rely on this peer's regular
        checkpoints. `yields`: this peer writes none while it can rely on another one's, and none when it leaves if
        another peer stays and holds as much. `evaluation` is made of each checkpoint, and when it is due without one.
        `card` describes a checkpoint that was evaluated. `upload(path, loss, is the best)` hears of each checkpoint and
        may not block. `is_over()`: whether the run has ended, so that nobody waits for this peer's state.
        """
        self._store = store
        self._model = model
        self._optimizer = optimizer
        self._every = every
        self._copy = copy
        self._offers = offers and every > 0
        self._yields = yields
        self._events = events or Events()
        self._evaluation = evaluation
        self._card, self._upload = card, upload
        self._is_over = is_over
        self._measured: tuple[str, Evaluated | None] = "", None  # lineage of the last evaluation, and its result
        self._seen = optimizer.local_epoch
        self._written = self._lineage  # lineage of the last state that need not be written any more
        self._writer = ThreadPoolExecutor(1, "swarm-checkpoints", initializer=_give_way)
        self._work: Future[bool] | None = None  # result: whether this peer has to write a checkpoint now
        self.failed = False  # the last state could not be written
        self.path = path
        self.outcome = ""  # what became of the last state, for people; "": there was nothing new

    @property
    def _lineage(self) -> str:
        return self._optimizer.report().lineage

    def look(self) -> None:
        """To be called between steps: begins to write if a multiple of `every` was passed since the last call.

        A peer that yields first finds out, beside its steps, whether another one writes; if not, it begins to write a
        step or two later. Raises what a write that has ended meanwhile raised: SiteError, if a process of the site is
        gone.
        """
        epoch = self._optimizer.local_epoch
        writes, passed = self._passed(self._every), epoch != self._seen
        self._seen = epoch
        if self._work is not None and not self._work.done():
            return
        ended, self._work = self._work, None
        try:
            self._begin_what_is_due(epoch, writes, passed, must=ended is not None and ended.result())
        except (RuntimeError, OSError) as error:  # no thread or memory; or no room for a copy of a site's statistics
            if isinstance(error, SwarmError):
                raise
            self._events.emit(Noticed("warning", f"no checkpoint of epoch {epoch} is written or evaluated: {error}"))

    def keep(self) -> None:
        """Writes what the optimizer holds, and waits until it is written."""
        report = self._optimizer.report()
        self._write(on_host(self._model), self._copy(self._optimizer.state_dict()), report.epoch, report.lineage)

    def _begin_what_is_due(self, epoch: int, writes: bool, passed: bool, *, must: bool) -> None:
        measures = passed and self._evaluation is not None and self._evaluation.is_due(epoch)
        if must or measures or (writes and not self._yields):
            self._begin(must or (writes and not self._yields), asks=writes and self._yields and not must)
        elif writes:
            self._work = self._writer.submit(self._must_write)

    def _passed(self, every: int) -> bool:
        return every > 0 and self._optimizer.local_epoch // every > self._seen // every

    def _must_write(self) -> bool:
        return not self._optimizer.call(lambda core: core.succession.is_elsewhere())

    def _begin(self, writes: bool, *, asks: bool) -> None:
        """`asks`: whether this peer finds out after the evaluation that it has to write."""
        taken = self._optimizer.state_dict()  # taken between two steps; this waits until the model has its updates
        report, model = self._optimizer.report(), on_host(self._model)
        state = self._copy(taken) if writes else None

        if state is None:
            self._store.put_averages(model, taken)  # here, since the averages change when the run goes on

        def work() -> bool:
            """Runs beside training, with a copy: first it writes the checkpoint, then it evaluates it."""
            path = None
            if state is not None:
                path = self._write(model, state, report.epoch, report.lineage)
                self._store.put_averages(model, state)
            self._evaluate(model, report.epoch, report.lineage, path)
            return asks and self._must_write()

        # A trainer computes beside this, and its threads wait for each other at the end of each operation: one that
        # lost its core to another team of threads would hold up all. So beside a trainer this uses one thread.
        self._work = self._writer.submit(on_one_thread if self._yields else on_all_threads, work)

    def _evaluate(self, model: nn.Module, epoch: int, lineage: str, path: Path | None) -> None:
        """Evaluates each state once, even if this peer finds out afterwards that it has to write it."""
        if self._evaluation is not None and self._measured[0] != lineage:
            self._measured = lineage, self._evaluation(model, epoch)
        result = self._measured[1]
        if path is None:
            return
        best = result is not None and self._store.remember_loss(path, result.loss, result.samples, result.metrics)
        if result is not None:
            self._card(path, result)
        self._upload(path, result.loss if result else None, best)

    def _write(self, model: nn.Module, state: Mapping[str, Any], epoch: int, lineage: str) -> Path | None:
        path = self._store.write(model, state, epoch)
        self.failed = path is None
        if path is not None:
            self.path, self._written = path, lineage
        if self._offers:  # if this peer cannot write, another one takes over
            self._optimizer.call(lambda core: core.succession.offer(path is not None))
        return path

    def __enter__(self) -> Self:
        self._writer.submit(int).result()  # starts the thread now: later this computer may have none left
        if self._offers:
            self._optimizer.call(lambda core: core.succession.offer(True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.shutdown(wait=True)
        # Unreadable data says nothing against the state. But other processes of a site may be gone then.
        if kind is None or (issubclass(kind, DataError) and self._yields):
            self._keep_last()

    def _keep_last(self) -> None:
        """Writes the state unless it is written, or another peer keeps it. `outcome` says what was done."""
        self.failed, before = False, self.outcome
        optimizer = self._optimizer
        fresh = optimizer.is_averaging or self._lineage != self._written
        if not (fresh or self.path):
            return  # it holds no more than each peer begins with
        try:
            state = optimizer.state_dict() if fresh else {}  # waits for the end of an epoch that is ending
        except OSError as error:
            self.failed = True
            self._events.emit(Noticed("warning", f"the state of epoch {optimizer.local_epoch} was not saved: {error}"))
            return
        heir = optimizer.call(lambda core: core.succession.leave(relies=self._yields))
        if fresh:
            if heir is not None and self._yields:
                report = optimizer.peers().get(heir[0])
                name = (report and report.name) or heir[0].short
                self.outcome = f"the model is safe: peer {name} has it (epoch {heir[1]})"
                return
            path = self._write(self._model, state, optimizer.local_epoch, self._lineage)
            if path is not None:
                model = self._model
                if self._evaluation is not None:
                    model = on_host(model)
                    self._store.put_averages(model, state)
                self._evaluate(model, optimizer.local_epoch, self._lineage, path)
        if self.failed:
            self.outcome = f"epoch {optimizer.local_epoch} could not be saved in {self._store.directory}"
        elif self.path is not None:
            self.outcome = f"saved epoch {optimizer.local_epoch} at {self.path}"
        if (
            heir is None and self.outcome and not (before or self._is_over())
        ):  # where it is saved, the peer's last line says
            self._events.emit(Noticed("info", ALONE))

    def require(self) -> None:
        """To be called when the others need this peer no more. Tries once more to write what could not be written, and
        raises CheckpointError if that fails too."""
        if self.failed:
            self._keep_last()
        if self.failed:
            raise not_saved(self._store.directory)


def _give_way() -> None:
    """Lowers the priority of the thread that writes and evaluates, where a thread has its own (Linux)."""
    if platform.system() == "Linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


@contextmanager
def saving(
    collaboration: Collaboration, stopped: Callable[[], bool], *, yields: bool
) -> Iterator[BackgroundCheckpoints]:
    """Does the peer's part of `checkpoint.every_epochs` in its home while the block lasts, with evaluations and
    uploads.

    `stopped()`: whether the user has told the peer to leave; then it waits for no evaluation and no upload.
    """
    peer, every = collaboration.peer, collaboration.peer.recipe.checkpoint.every_epochs
    evaluates = peer.recipe.evaluation.every_epochs
    settings = peer.recipe.checkpoint.upload
    uploads = Uploads(peer.home.path, hub(settings), peer.events) if settings.repo is not None else None

    def upload(path: Path, loss: float | None, best: bool) -> None:
        if uploads is not None and (best or settings.when == "each"):
            uploads.offer(path, loss)

    try:
        with BackgroundCheckpoints(
            store_of(collaboration),
            collaboration.model,
            collaboration.optimizer,
            every,
            offers=True,
            yields=yields,
            path=collaboration.resumed,
            events=peer.events,
            evaluation=Evaluation(collaboration, stopped) if evaluates else None,
            card=partial(write_card, collaboration),
            upload=upload,
            is_over=collaboration.has_ended,
        ) as checkpoints:
            begins_with = collaboration.resumed
            if begins_with and not begins_with.resolve().is_relative_to(peer.home.path.resolve()):
                checkpoints.keep()  # the peer looks here when it starts again, which may be before its first epoch
            yield checkpoints
    finally:
        if uploads is not None:
            uploads.close(stopped)


def not_saved(place: Path) -> CheckpointError:
    """Returns the error of a peer whose last state could not be written to `place`."""
    return CheckpointError(
        f"what this peer has learned is not in {place}: see the warning above; the checkpoints there are as they were. "
        "Other peers of the run may have it as well: make room, and join again while one of them is there"
    )
