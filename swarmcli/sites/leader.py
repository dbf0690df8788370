"""SiteLeader: the optimizer of rank 0's training loop. It steps in the swarm with the samples of all ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch import nn

from swarmcli.errors import SiteError
from swarmcli.optim import Optimizer
from swarmcli.sites.gradients import LeaderGradients
from swarmcli.sites.orders import OrderDesk
from swarmcli.sites.pace import Pace, Report, SharedModel, Verdict
from swarmcli.sites.sharded_optimizer import SiteOptimizer
from swarmcli.sites.site import FORMING_SECONDS, Site

logger = logging.getLogger(__name__)


class SiteLeader:
    """Rank 0 of a site, whose Optimizer takes its steps in the swarm for all ranks.

    A step gathers the others' reports, steps the Optimizer with the samples of all, tells the others how it went and,
    where its model has changed, gives them its parameters and buffers. So before the next batch every rank's model is
    this one's. For one thread, the training loop's. Whatever a method raises, the other ranks end too, with SiteErrors.

    `stopped` is set after the same step at all ranks: one of them wanted to stop, or the data of all has ended.
    """

    def __init__(
        self,
        site: Site,
        desk: OrderDesk,
        optimizer: Optimizer,
        model: nn.Module,
        gradients: LeaderGradients,
        *,
        wants_to_stop: threading.Event | None = None,
    ) -> None:
        """`gradients` fits what the Optimizer was made with; `wants_to_stop` is set when this rank's user wants to."""
        self._site, self._desk = site, desk
        self._optimizer = optimizer
        self._gradients = gradients
        self._wants_to_stop = wants_to_stop or threading.Event()
        self._sharded = optimizer.opt if isinstance(optimizer.opt, SiteOptimizer) else None
        self._shared = self._sharded.shared if self._sharded is not None else SharedModel(site, model)
        self._pace = Pace(site)
        self._told: Verdict | None = None
        self._noted = (0.0, 0)  # loss and samples of the step that comes
        self.stopped = threading.Event()

    @property
    def local_epoch(self) -> int:
        """As all ranks have been told: where steps are delayed, the Optimizer comes to the next one between steps."""
        return self._optimizer.local_epoch if self._told is None else self._told.epoch

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def note_loss(self, loss: float, samples: int) -> None:
        """The mean loss over the samples of this rank in the step that comes. The swarm sees the site's mean."""
        self._noted = (loss, samples)

    def step(self, *, batch_size: int) -> None:
        """The present gradients are means over `batch_size` samples; see `Optimizer.step` for what happens to them.

        Raises SiteError if a rank is gone, or takes the site's timeout longer than this one for its batch.
        """
        self._step(batch_size, ended=False)

    def drain(self) -> None:
        """This rank's data has ended: takes part without samples until that of all ranks has, or one wants to stop."""
        while not self.stopped.is_set():
            self._step(0, ended=True)

    def load_state_from_peers(self) -> bool:
        """Waits for all ranks to be ready, joins the run, and gives everyone the model. All call it before training."""
        with self._all_or_none():
            self._pace.gather(timedelta(seconds=FORMING_SECONDS))
            changed = self._optimizer.load_state_from_peers()
            self._announce(stop=False)
        return changed

    def close(self) -> None:
        """The other ranks may go; then this one leaves the site. To be called after the Optimizer's shutdown."""
        self._give_up_orders()
        try:
            self._desk.close()
        except SiteError as error:
            logger.warning("not every rank was there to be let go: %s", error)
        self._site.close()

    def _give_up_orders(self) -> None:
        """A SiteOptimizer's statistics have a thread of their own that gives some."""
        if self._sharded is not None:
            self._sharded.statistics.close()

    def __enter__(self) -> SiteLeader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """After an error the other ranks are not waited for, they end by SiteErrors; otherwise as `close`."""
        if kind is None:
            self.close()
        else:
            self._site.break_off()
            self._give_up_orders()
            self._site.close()

    def _step(self, samples: int, *, ended: bool) -> None:
        with self._all_or_none():
            reports = self._pace.gather()
            total = self._gradients.take(samples, reports)
            own = self._own_report(samples, ended)
            self._note_site_loss([own, *reports], total)
            self._optimizer.step(batch_size=total)
            self._desk.check()
            everyone = [own, *reports]
            stop = any(each.wants_to_stop for each in everyone) or all(each.ended for each in everyone)
            self._announce(stop=stop, stepped=total > 0)

    def _own_report(self, samples: int, ended: bool) -> Report:
        (loss, rated), self._noted = self._noted, (0.0, 0)
        return Report(samples, loss * rated, rated, self._wants_to_stop.is_set(), ended)

    def _note_site_loss(self, reports: Sequence[Report], total: int) -> None:
        rated = sum(each.rated for each in reports)
        if rated and total:
            self._optimizer.note_loss(sum(each.losses for each in reports) / rated, total)

    def _announce(self, *, stop: bool, stepped: bool = False) -> None:
        epoch, told = self._optimizer.local_epoch, self._told
        new_epoch = told is None or epoch != told.epoch
        written = self._shared.written
        changed = not self._shared.equal and self._gradients.are_news(
            new_epoch=new_epoch, stepped=stepped, written=written
        )
        verdict = Verdict(
            epoch,
            new_parameters=changed,
            new_buffers=self._shared.has_buffers and (changed or new_epoch),
            stop=stop,
            generation=self._gradients.generation,
        )
        self._pace.announce(verdict)
        self._shared.transfer(verdict)
        self._told = verdict
        self._gradients.finish(verdict)
        if stop:
            self.stopped.set()

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """If the block comes to no end, nobody waits for this rank."""
        done = False
        try:
            yield
            done = True
        finally:
            if not done:
                self._site.break_off()
