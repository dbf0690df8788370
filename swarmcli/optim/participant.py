"""What trainers, followers and auxiliaries of a run have in common: they see each other, form groups, and pause."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, Protocol, TypeVar

from swarmcli.network.loop_thread import loop_time, set_within
from swarmcli.network.task_owner import TaskOwner
from swarmcli.optim.config import IDLE_WAIT, PeerContext
from swarmcli.optim.epoch.group import PreformedGroup
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.peers.directory import PeerDirectory
from swarmcli.optim.peers.follow import Claims
from swarmcli.optim.peers.progress import ProgressTrackerCore
from swarmcli.optim.peers.report import Pause, PeerMetrics, PeerReport, Phase, describe
from swarmcli.optim.peers.survey import Survey
from swarmcli.optim.state.lineage import Claim, LineagePosition

Cause = Literal["user", "line"]  # why a peer pauses: its user asks for it, or its line is too slow to follow the run
T = TypeVar("T")


class _Service(Protocol):
    async def start(self) -> None: ...
    async def shutdown(self) -> None: ...


class Participant(ABC):
    """One peer of a run. Its coroutines belong to one event loop; one `step` runs at a time."""

    _group: PreformedGroup
    _averagers: Sequence[_Service]

    def __init__(self, peer: PeerContext, mode: Mode | None) -> None:
        """`mode`: None: synchronous training without options."""
        self.node = node = peer.node
        self.config = config = peer.config
        self.mode = mode or Mode()
        self.metrics = PeerMetrics(node.peer_id, peer.events, follows=config.description.role == "monitor")
        self.phase: Phase = "assisting"
        self.leaving = False  # it is about to leave, and says so
        self.directory = PeerDirectory(node, config.run_id, self.report)
        self.pausing = Pausing(self.directory.announce)
        self.claims = Claims(self.directory)
        self.survey = Survey(self.claims)
        self.tracker = ProgressTrackerCore(
            node,
            config.run_id,
            config.target_batch_size,
            options=config.tracker,
            performance_ema_alpha=config.performance_ema_alpha,
            client_mode=config.client_mode,
            status_loglevel=logging.INFO if config.verbose else logging.DEBUG,
            latest_epoch=lambda: self.claims.leading(Claim(self.position)).epoch,
        )
        self._tasks = TaskOwner()

    async def start(self, *, reports: bool = True) -> None:
        """Makes this peer known. `reports`: it has progress to report."""
        for averager in self._averagers:
            await averager.start()
        await self.survey.start()
        await self.tracker.start(report=reports)
        self.metrics.begin()

    async def shutdown(self) -> None:
        """Leaves the group and withdraws what this peer said about itself. Idempotent; leaves no task."""
        await self._tasks.close()  # first: an end of epoch under way would open the next group
        await self._group.leave()
        for averager in self._averagers:
            await averager.shutdown()
        await self.tracker.shutdown()
        await self.survey.shutdown()

    def report(self, **more: Any) -> PeerReport:
        """Returns what this peer says about itself under `{run_id}_peers`."""
        told = {"phase": self.phase, "position": self.position, "pause": self.pausing.told, "leaving": self.leaving}
        return describe(self.node, self.config.description, self.config.terms, self.metrics, **(told | more))

    @property
    @abstractmethod
    def position(self) -> LineagePosition:
        """The position of this peer's parameters, or of the peers that it helps."""

    @property
    def is_averaging(self) -> bool:
        """Whether a round is under way."""
        return self._group.begun

    # pausing

    def pause(self, *, leaving: bool = False) -> None:
        """From now on this peer is to compute nothing, and the others hear of it at once. Idempotent. `leaving`: they
        also hear that it will not come back, so nobody counts on it to hand out its state.

        The caller goes on to call `step`: with the batch that was under way, if there is one, which counts; then
        without samples. Such steps bring what was computed to the round that ends the epoch. When a round has taken it,
        or if there was nothing, the peer withdraws: it is in no group, and further steps only wait a moment.
        """
        self.leaving |= leaving
        self.pausing.ask()
        self.tracker.rest(True)

    def resume(self) -> None:
        """This peer may compute again. A trainer then joins, and so finds out where the run is. Idempotent."""
        self.pausing.end()

    @property
    def has_handed_in(self) -> bool:
        """For a peer that pauses: whether nobody counts on it any more."""
        return self.pausing.away

    async def _rest(self) -> None:
        """A step while this peer pauses and has nothing on its way to a round: it withdraws, or waits a moment."""
        if self.pausing.away:
            await self.pausing.wait(IDLE_WAIT)
            return
        await self._group.close()
        await self._settle()
        await self._group.averager.finder.withdraw()
        self.pausing.withdraw()

    @abstractmethod
    async def _settle(self) -> None:
        """Waits until what others still count on has ended."""


class Pausing:
    """Whether a peer pauses, and how far it is with that.

    working ──asked──▶ pausing ──nothing left to hand in──▶ paused ──ended──▶ returning ──in step again──▶ working
                          └────────────────────────ended────────────────────────────────────────────────────▶

    A peer that pauses computes nothing. While it has samples that no round has taken, it stays in its group, so that
    they count; then it withdraws, and nobody waits for it. When it returns, it asks where the run is.

    It belongs to one event loop.
    """

    def __init__(self, changed: Callable[[], object]) -> None:
        """`changed` is called after each change of what others are told."""
        self._changed = changed
        self._asked_by: set[Cause] = set()
        self.away = False  # it has withdrawn, and has not found out since where the run is
        self.away_since = 0.0  # loop time
        self._ends = set[asyncio.Timeout]()  # the time limits of work that a pause ends
        self._ended = asyncio.Event()

    @property
    def is_asked(self) -> bool:
        """Whether this peer is to compute nothing."""
        return bool(self._asked_by)

    @property
    def told(self) -> Pause:
        """The word that others hear of it."""
        if self.away:
            return "paused" if self.is_asked else "returning"
        return "pausing" if self.is_asked else ""

    def ask(self, cause: Cause = "user") -> None:
        """From now on this peer is to compute nothing, until each cause has ended. Idempotent."""
        asked_before = self.is_asked
        self._asked_by.add(cause)
        if not asked_before:
            for end in self._ends:
                end.reschedule(loop_time())
            self._ended.clear()
            self._changed()

    def end(self, cause: Cause = "user") -> None:
        """This cause is over: the peer may compute unless there is another. Idempotent."""
        asked_before = self.is_asked
        self._asked_by.discard(cause)
        if asked_before and not self.is_asked:
            self._ended.set()
            self._changed()

    def withdraw(self) -> None:
        """The peer takes part in nothing any more."""
        if not self.away:
            self.away, self.away_since = True, loop_time()
            self._changed()

    def come_back(self) -> float:
        """The peer is in step with the run again. Returns the seconds for which it was away."""
        if not self.away:
            return 0.0
        self.away = False
        self._changed()
        return loop_time() - self.away_since

    async def wait(self, seconds: float) -> None:
        """Waits until the pause ends, for `seconds` at most."""
        await set_within(self._ended, seconds)

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Returns the result of `work`; None, and the work is cancelled, if a pause is asked for before it ends.

        It runs in the caller's task. With a task of its own, other tasks would run first even if the work ends at once,
        and report that this peer is not in step, just before it is.
        """
        try:
            async with asyncio.timeout(0.0 if self.is_asked else None) as end:
                self._ends.add(end)
                return await work
        except TimeoutError:
            if not end.expired():
                raise
            return None
        finally:
            self._ends.discard(end)
