"""SiteMember: the optimizer of the training loops at all ranks but 0. It gives gradients and takes parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from swarmcli.errors import SiteError
from swarmcli.sites.gradients import MemberGradients
from swarmcli.sites.orders import Follower, Order
from swarmcli.sites.pace import Pace, Report, SharedModel
from swarmcli.sites.site import Site


class SiteMember:
    """A rank of a site that computes for rank 0. Its model is rank 0's whenever a step has ended.

    For one thread, the training loop's; another, the Follower's, carries out rank 0's orders meanwhile. Methods raise
    SiteError once the site has lost a rank or one of them has failed; then this process is of no more use to it.

    `stopped` is set after the same step at all ranks: one of them wanted to stop, or the data of all has ended.
    """

    def __init__(
        self,
        site: Site,
        model: nn.Module,
        gradients: MemberGradients,
        handlers: Mapping[type[Order], Callable[[Any], None]] | None = None,
        *,
        wants_to_stop: threading.Event | None = None,
    ) -> None:
        """`handlers`: for further orders, of a sharded optimizer for example; from here on they may come."""
        self._site = site
        self._model = model
        self._gradients = gradients
        self._wants_to_stop = wants_to_stop or threading.Event()
        self._shared = SharedModel(site, model)
        self._pace = Pace(site)
        self._noted = (0.0, 0)  # loss and samples of the step that comes
        self.local_epoch = 0  # rank 0's
        self.stopped = threading.Event()
        self._follower = Follower(site, {**gradients.handlers, **(handlers or {})})
        self._follower.start()

    def zero_grad(self) -> None:
        self._model.zero_grad(set_to_none=True)

    def note_loss(self, loss: float, samples: int) -> None:
        """The mean loss over the samples of this rank in the step that comes. The swarm sees the site's mean."""
        self._noted = (loss, samples)

    def step(self, *, batch_size: int) -> None:
        """Gives the present gradients, means over `batch_size` samples, and waits until rank 0's step is over.

        That may take as long as the swarm's end of an epoch does. Raises SiteError.
        """
        self._step(batch_size, ended=False)

    def drain(self) -> None:
        """This rank's data has ended: takes part without samples until that of all ranks has, or one wants to stop."""
        while not self.stopped.is_set():
            self._step(0, ended=True)

    def load_state_from_peers(self) -> bool:
        """Waits until rank 0 has joined the run, and takes its model and epoch. Always True: the model is another."""
        with self._all_or_none():
            self._pace.report(Report())
            self._follow()
        return True

    def close(self) -> None:
        """Stays for rank 0's orders until that lets this rank go, then leaves the site. Raises SiteError."""
        try:
            self._follower.join()
        finally:
            self._site.close()

    def __enter__(self) -> SiteMember:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """After an error the other ranks are not waited for, they end by SiteErrors; otherwise as `close`."""
        if kind is None:
            self.close()
        else:
            self._site.close(broken=True)

    def _step(self, samples: int, *, ended: bool) -> None:
        with self._all_or_none():
            self._gradients.prepare(samples)
            self._pace.report(self._own_report(samples, ended))
            self._gradients.contribute(samples)
            self._follow()

    def _own_report(self, samples: int, ended: bool) -> Report:
        (loss, rated), self._noted = self._noted, (0.0, 0)
        return Report(samples, loss * rated, rated, self._wants_to_stop.is_set(), ended, self._gradients.generation)

    def _follow(self) -> None:
        verdict = self._pace.verdict()
        self._shared.transfer(verdict)
        self.local_epoch = verdict.epoch
        self._gradients.finish(verdict)
        if verdict.stop:
            self.stopped.set()

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """If the block comes to no end, nobody waits for this rank."""
        done = False
        try:
            yield
            done = True
        except SiteError:
            self._follower.check()  # what that died of is the reason to give
            raise
        finally:
            if not done:
                self._site.break_off()
