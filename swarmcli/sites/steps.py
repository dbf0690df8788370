"""SiteLeader and SiteMember: the optimizers of the training loops of a site. All ranks take the same steps."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from torch import nn

from swarmcli.errors import SiteError
from swarmcli.optim import Optimizer
from swarmcli.optim.gradients.accumulator import Weighed
from swarmcli.sites.commands import Command, Handlers, LeaderCommands, StepVerdict, follow
from swarmcli.sites.gradients import GatherSums, RankSums, SiteAccumulator, average_gradients
from swarmcli.sites.sharded_optimizer import SiteOptimizer
from swarmcli.sites.site import Site
from swarmcli.sites.step_sync import SharedModel, StepReport, announce, gather_reports, send_report

logger = logging.getLogger(__name__)


class SiteSteps(ABC):
    """What all ranks have in common. For one thread, the training loop's.

    Methods raise SiteError after the site has lost a rank, or one of them has failed; this process then cannot go on in
    it. Whatever a method raises, the other ranks end too, with SiteErrors.

    `stopped` is set after the same step at all ranks: when one wanted to stop, the data of all has ended, or the run
    has.
    """

    _commands: LeaderCommands | None = None

    def __init__(self, site: Site, parameters: Sequence[nn.Parameter], wants_to_stop: threading.Event | None) -> None:
        self._site = site
        self._parameters = list(parameters)
        self._wants_to_stop = wants_to_stop or threading.Event()
        self._noted = (0.0, 0.0)  # mean loss of the next step, and its weight
        self.stopped = threading.Event()

    def note_loss(self, loss: float, weight: float) -> None:
        """Notes this rank's mean loss in the next step, with its weight. The swarm sees the site's mean."""
        self._noted = (loss, weight)

    @property
    def is_averaging(self) -> bool:
        """Whether a step without a batch is wanted between two others. Always False: the processes of a site take each
        step together."""
        return False

    def step(self, *, batch_size: int, weight: float | None = None) -> None:
        """Steps with the present gradients of all ranks. This rank's are means over `batch_size` samples, which count
        by `weight` if it is given.

        Rank 0 does what `Optimizer.step` does, and raises SiteError if another rank takes longer for its batch by the
        site's timeout. The others run its commands until that is over, however long the swarm takes to end an epoch.
        """
        with self._all_or_none():
            self._step(Weighed.of(batch_size, weight) if batch_size else Weighed(), ended=False)

    def drain(self) -> None:
        """After this rank's data has ended: takes part without samples until `stopped`."""
        while not self.stopped.is_set():
            with self._all_or_none():
                self._step(Weighed(), ended=True)

    @abstractmethod
    def close(self) -> None:
        """Leaves the site after the others no longer need this rank."""

    @abstractmethod
    def break_off(self) -> None:
        """This rank takes no further step: the other ranks do not wait for it, and end with SiteErrors. Idempotent;
        from any thread."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """After an error it does not wait for the other ranks; otherwise the same as `close`."""
        if kind is None:
            self.close()
        else:
            self.break_off()
            self._site.close(broken=True)

    @abstractmethod
    def _step(self, batch: Weighed, *, ended: bool) -> None: ...

    def _own_report(self, batch: Weighed, ended: bool) -> StepReport:
        (loss, rated), self._noted = self._noted, (0.0, 0.0)
        return StepReport(batch.samples, batch.weight, loss * rated, rated, self._wants_to_stop.is_set(), ended)

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """If the block raises, breaks off, so that nobody waits for this rank."""
        done = False
        try:
            yield
            done = True
        except SiteError:
            if self._commands is not None:
                self._commands.check()  # raises the failed command's error, of which this one is a consequence
            raise
        finally:
            if not done:
                self.break_off()


class SiteLeader(SiteSteps):
    """Rank 0 of a site, whose Optimizer steps in the swarm for all ranks.

    A step gathers the others' reports, steps the Optimizer with the samples of all, tells the others how it went and,
    if its model has changed, sends them its parameters and buffers. So before the next batch every rank has this one's
    model; `close` sends it once more, since an average may come in after the last step.

    Work that needs the other ranks, for example saving a sharded optimizer, belongs into a step (`in_step`), before the
    first one (`await_ranks`), or after the last: between steps they compute.
    """

    _commands: LeaderCommands

    def __init__(
        self,
        commands: LeaderCommands,
        optimizer: Optimizer,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        sums: SiteAccumulator | None,
        *,
        wants_to_stop: threading.Event | None = None,
        has_ended: Callable[[], bool] = lambda: False,
        in_step: Sequence[Callable[[], object]] = (),
        heed: Callable[[], object] | None = None,
    ) -> None:
        """`parameters`: those that are trained, in the order of the optimizer. `sums`: its accumulator; None: it makes
        local updates. `wants_to_stop`: set when this rank's user wants to. `has_ended`: whether the run has, so that
        all ranks stop. `in_step`: called in each step; they return when the site may go on computing, and until then
        all ranks wait. `heed`: called when another rank wants to stop; it has to set `wants_to_stop`, perhaps later in
        one of `in_step`. None: sets it at once."""
        super().__init__(commands.site, parameters, wants_to_stop)
        self._commands, self._optimizer, self._sums = commands, optimizer, sums
        inner = optimizer.opt
        self._shared = inner.shared if isinstance(inner, SiteOptimizer) else SharedModel(commands.site, model)
        self._told: StepVerdict | None = None
        self._has_ended = has_ended
        self.in_step = list(in_step)
        self._heed = heed or self._wants_to_stop.set

    @property
    def local_epoch(self) -> int:
        """The epoch that all ranks were told. With delayed steps the Optimizer may be ahead of it between steps."""
        return self._optimizer.local_epoch if self._told is None else self._told.epoch

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def await_ranks(self) -> None:
        """Returns when all ranks wait in `load_state_from_peers`. Nothing that needs them can run earlier."""
        if not self._commands.is_open:
            with self._all_or_none():
                gather_reports(self._site, self._site.forming)
                self._commands.open()

    def load_state_from_peers(self) -> bool:
        """Waits for all ranks, joins the run, and sends all the model. All ranks call it before they train."""
        self.await_ranks()
        with self._all_or_none():
            changed = self._optimizer.load_state_from_peers()
            self._end_step(stop=False)
        return changed

    def break_off(self) -> None:
        self._commands.fail("rank 0 takes no further step")

    def close(self) -> None:
        """Sends the other ranks the last model and lets them go; then this rank leaves the site. To be called after the
        Optimizer's shutdown."""
        last = StepVerdict(self.local_epoch, new_parameters=True, new_buffers=True, stop=True)
        try:
            self._commands.shut()
            announce(self._site, last)
            self._shared.transfer(last)
        except SiteError as error:
            logger.warning("not every rank was there to be let go: %s", error)
        self._site.close()
        self._commands.fail("the site has been told to end")

    def _step(self, batch: Weighed, *, ended: bool) -> None:
        reports = gather_reports(self._site)
        if any(each.wants_to_stop for each in reports):
            self._heed()
        others = sum((each.weighed for each in reports), Weighed())
        if self._sums is not None:
            total = self._sums.expect(batch, others)
        else:
            total = batch + others
            average_gradients(self._site, self._parameters, batch, total)
        everyone = [self._own_report(batch, ended), *reports]
        if total.samples and (rated := sum(each.rated for each in everyone)):
            self._optimizer.note_loss(sum(each.losses for each in everyone) / rated, total.weight)
        self._commands.open()
        self._optimizer.step(batch_size=total.samples, weight=total.weight)
        # Now all ranks' samples of this step are counted, and the others wait for the verdict, however long that takes.
        stepped = total.samples > 0 and self._sums is None
        self._end_step(stop=all(each.ended for each in everyone), stepped=stepped)

    def _end_step(self, *, stop: bool, stepped: bool = False) -> None:
        for work in self.in_step:
            work()
        self._commands.shut()
        stop = stop or self._has_ended() or self._wants_to_stop.is_set()
        epoch, told = self._optimizer.local_epoch, self._told
        new_epoch = told is None or epoch != told.epoch
        # `written` alone is not enough: kernels such as torch's fused optimizers do not move version counters.
        changed = not self._shared.equal and (new_epoch or stepped or self._shared.written)
        self._told = StepVerdict(
            epoch,
            new_parameters=changed,
            new_buffers=self._shared.has_buffers and (changed or new_epoch),
            stop=stop,
            void=self._sums is not None and self._sums.take_void(),
        )
        announce(self._site, self._told)
        self._shared.transfer(self._told)
        if stop:
            self._commands.open()  # the others wait for commands in `close`
            self.stopped.set()


class SiteMember(SiteSteps):
    """A rank of a site that computes for rank 0. After each step its model equals rank 0's."""

    def __init__(
        self,
        site: Site,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        handlers: Handlers | None = None,
        *,
        local_updates: bool = False,
        wants_to_stop: threading.Event | None = None,
    ) -> None:
        """`parameters`: those that are trained, in the order of rank 0's optimizer; `handlers`: for further commands,
        of a sharded optimizer for example. `local_updates`: whether rank 0 makes them."""
        super().__init__(site, parameters, wants_to_stop)
        self._model = model
        self._shared = SharedModel(site, model)
        self._sums = None if local_updates else RankSums(site, self._parameters)
        own: Mapping[type[Command], Callable[[Any], None]] = {}
        if self._sums is not None:
            own = {GatherSums: self._sums.hand_over}
        self._handlers = {**own, **(handlers or {})}
        self.local_epoch = 0  # rank 0's

    def zero_grad(self) -> None:
        self._model.zero_grad(set_to_none=True)

    def load_state_from_peers(self) -> bool:
        """Waits until rank 0 has joined the run, and takes its model and epoch. Returns True, since the model was
        replaced."""
        with self._all_or_none():
            send_report(self._site, StepReport())
            self._follow()
        return True

    def break_off(self) -> None:
        self._site.break_off()

    def close(self) -> None:
        """Runs rank 0's commands until that sends the last model, then leaves the site. Raises SiteError."""
        try:
            with self._all_or_none():
                self._follow()
        finally:
            self._site.close()

    def _step(self, batch: Weighed, *, ended: bool) -> None:
        if self._sums is not None:
            self._sums.add(batch)
        send_report(self._site, self._own_report(batch, ended))
        if self._sums is None:
            average_gradients(self._site, self._parameters, batch, Weighed())
        self._follow()

    def _follow(self) -> None:
        verdict = follow(self._site, self._handlers)
        self._shared.transfer(verdict)
        self.local_epoch = verdict.epoch
        if verdict.void and self._sums is not None:
            self._sums.clear()
        if verdict.stop:
            self.stopped.set()
