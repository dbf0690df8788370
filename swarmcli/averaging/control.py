"""The request for a round, the control that steers it while it is under way, and its result."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from swarmcli.averaging.checks import check_numbers
from swarmcli.averaging.config import MAX_WEIGHT, MIN_WEIGHT, check_terms
from swarmcli.averaging.group import MAX_GATHERED_BYTES, Group
from swarmcli.averaging.round.result import Outcome, RoundResult
from swarmcli.clock import Clock
from swarmcli.errors import RoundFailed, RoundUndecided
from swarmcli.events import RoundFinished, RoundOutcome
from swarmcli.network import wire
from swarmcli.network.identity import PeerID
from swarmcli.network.limits import MAX_TAG_BYTES
from swarmcli.network.loop_thread import SwarmFuture, loop_time
from swarmcli.network.wire.messages import MOST

T = TypeVar("T")


class AveragingStage(Enum):
    """How far a round has come."""

    IDLE = "idle"  # not begun yet
    LOOKING_FOR_GROUP = "looking for group"
    AWAITING_TRIGGER = "awaiting trigger"  # the group is there, `allow_allreduce` has not been called
    RUNNING_ALLREDUCE = "running all-reduce"
    FINISHED = "finished"  # with a result, an error, or cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRequest:
    """One round of averaging. Raises ValueError or TypeError for values that make no sense."""

    tag: bytes = b""  # lineage: only peers with equal tags form groups
    gather: Any = None  # goes to every member of the group; anything msgpack carries
    weight: float = 1.0  # of this peer's tensors; 0: takes part and adds nothing
    timeout: float | None = None  # seconds for finding a group, over all tries; None: no bound
    lookout: float | None = None  # seconds to look on while somebody is missing; None: as the averager's options say
    scheduled_time: float | None = None  # swarm time before which the group does not begin
    require_trigger: bool = False  # wait for `StepControl.allow_allreduce` once the group is there
    allow_retries: bool = True  # look for another group when one fails
    target: float | None = None  # of a preformed group: it begins when its members' progress sums up to this
    weighs: bool = False  # progress is what weights tell: a round with less than half of the target fails
    sends: bool = True  # in a preformed group: False for a peer that follows, whose weight stays zero
    only_one: bool = False  # of its tag: where another, as large, has begun, this search ends with RoundMissed
    since: float | None = None  # swarm time; a peer that looks under another tag later than this has had that round
    epoch: int = -1  # for events only
    queue: Sequence[PeerID] = ()  # of its tag: the members of the round that led to it, as they lead the next, or ()
    terms: Mapping[str, str] = field(default_factory=dict)  # members must have equal ones, or are told which differ

    def __post_init__(self) -> None:
        check_weight(self.weight)
        for name, value in (("timeout", self.timeout), ("lookout", self.lookout), ("target", self.target)):
            check_numbers(optional=True, **{name: value})
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be None or a positive number, got {value!r}")
        check_numbers(optional=True, scheduled_time=self.scheduled_time, since=self.since)
        if self.scheduled_time is not None and not math.isfinite(self.scheduled_time):
            raise ValueError(f"scheduled_time must be a swarm time, got {self.scheduled_time!r}")
        if len(self.tag) > MAX_TAG_BYTES:
            raise ValueError(f"a tag has at most {MAX_TAG_BYTES} bytes, got {len(self.tag)}")
        check_terms(self.terms)


class Milestone(SwarmFuture[T]):
    """Something that will happen, or not. A caller may give up waiting for it; that ends only its own waiting."""

    def cancel(self) -> bool:
        return False

    def never(self) -> None:
        """It will not happen any more: callers that wait see a cancellation. Without effect if it has happened."""
        super().cancel()


class StepControl:
    """One round under way. Methods and properties may be used from any thread; `await` from any event loop.

    Awaiting it, or `result`, gives the RoundResult or raises MatchmakingError, NoReducerError, FingerprintError,
    RoundFailed (tensors untouched), RoundUndecided (inputs kept), or CancelledError.
    """

    def __init__(self, request: RoundRequest, clock: Clock) -> None:
        """Belongs to the running loop. Made by AveragerCore.begin_round."""
        self.request = request
        self.allow_retries = request.allow_retries
        self.begun: Milestone[Group] = Milestone()  # done when the round begins, or with why it never does
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._clock = clock
        self._future: Milestone[RoundResult] = Milestone()
        self._started = clock.now()
        self.stage = AveragingStage.IDLE
        self.group: Group | None = None  # that this peer is in, once there is one; after a failed try, the last one
        self._weight = float(request.weight)
        self.samples: float | None = None  # that the tensors come of; None: as many as they weigh
        self._scheduled_time = request.scheduled_time
        self.progress = 0.0  # as last reported
        self.urgent = asyncio.Event()  # the last report goes out at once
        self._trigger = asyncio.Event()
        self.began_allreduce = False  # whether the tensors are being averaged, or have been; the weight is settled then
        self.task: asyncio.Task[None] | None = None  # it carries the round out; `cancel` cancels it
        self.listener: Callable[[], None] | None = None  # called after a report or a new schedule
        if not request.require_trigger:
            self._trigger.set()

    # For the caller

    @property
    def triggered(self) -> bool:
        """Whether the all-reduce may start as soon as there is a group."""
        return self._trigger.is_set()

    @property
    def deadline(self) -> float:
        """The swarm time until which a group must be found; infinite without a timeout."""
        return math.inf if self.request.timeout is None else self._started + self.request.timeout

    @property
    def weight(self) -> float:
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        check_weight(weight)
        if self.began_allreduce:
            raise RuntimeError("the weight cannot be changed any more: the all-reduce has begun")
        self._weight = float(weight)

    @property
    def scheduled_time(self) -> float | None:
        """Swarm time before which the group does not begin; may be changed until it does."""
        return self._scheduled_time

    @scheduled_time.setter
    def scheduled_time(self, scheduled_time: float) -> None:
        if not math.isfinite(scheduled_time):
            raise ValueError(f"scheduled_time must be a swarm time, got {scheduled_time!r}")
        self._scheduled_time = float(scheduled_time)
        self._on_loop(self._notify)

    def report(self, progress: float) -> None:
        """How much this peer has done so far towards the preformed group's target, in sum; never shrinks."""
        if not (math.isfinite(progress) and progress >= 0):
            raise ValueError(f"progress must be finite and not negative, got {progress!r}")
        if progress > self.progress:
            self.progress = min(float(progress), MOST)  # others refuse more
            self._on_loop(self._notify)

    def hurry(self) -> None:
        """This peer has stopped to wait for the group: the leader gets the last report at once."""
        self._on_loop(self.urgent.set)

    def allow_allreduce(self) -> None:
        """This peer's tensors and weight are ready. Without `require_trigger` they are from the start."""
        self._on_loop(self._trigger.set)

    def cancel(self) -> bool:
        """Leaves the group, or the round; the others go on. Returns False if the round has ended already."""
        if self.done():
            return False
        if self.task is not None:
            self._on_loop(self.task.cancel)
        return True

    def done(self) -> bool:
        return self._future.done()

    def cancelled(self) -> bool:
        return self._future.cancelled()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error that the round ended with, once it has. Not for the loop's own thread."""
        return self._future.exception(timeout)

    def result(self, timeout: float | None = None) -> RoundResult:
        """Waits for the end. TimeoutError after `timeout` seconds, the round goes on. Not for the loop's own thread."""
        return self._future.result(timeout)

    async def outcome(self) -> Outcome:
        """The result, or why there is none; a round that was cancelled, or found no group, has failed. Cancelling this
        leaves the round as it is."""
        ended = asyncio.Event()
        self._future.add_done_callback(lambda _: ended.set())
        await ended.wait()
        if self._future.cancelled():
            return RoundFailed("the round was left")
        error = self._future.exception()
        if error is None or isinstance(error, RoundUndecided):
            return error or self._future.result()
        return RoundFailed(str(error))

    def __await__(self) -> Generator[Any, None, RoundResult]:
        return self._future.__await__()

    def __repr__(self) -> str:
        return f"<StepControl {self.stage.value}>"

    # For the averager, on the loop

    def mark_begun(self, group: Group) -> None:
        self.group = group
        if not self.begun.done():
            self.begun.set_result(group)

    async def wait_for_trigger(self) -> float:
        """Returns the weight, which is settled from then on."""
        await self._trigger.wait()
        self.began_allreduce = True
        return self._weight

    def finish(self, outcome: RoundResult | Exception | None) -> None:
        """Ends it with a result or an error; None: it was cancelled. Without effect if it has ended."""
        self.stage = AveragingStage.FINISHED
        if not self.begun.done():
            error = outcome if isinstance(outcome, Exception) else RoundFailed("the round was left before it began")
            self.begun.set_exception(error)
        if self._future.done():
            return
        if outcome is None:
            self._future.never()
        elif isinstance(outcome, Exception):
            self._future.set_exception(outcome)
        else:
            self._future.set_result(outcome)

    def _on_loop(self, action: Callable[[], object]) -> None:
        if threading.get_ident() == self._thread:
            action()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action)

    def _notify(self) -> None:
        if self.listener is not None:
            self.listener()


class Chronicle:
    """The story of one try at a round, for the event that tells it. `group` is set once there is one."""

    def __init__(self, control: StepControl, purpose: str) -> None:
        self.seconds: dict[str, float] = {}
        self.group: Group | None = None
        self._control, self._purpose = control, purpose

    @contextmanager
    def stage(self, stage: AveragingStage) -> Iterator[None]:
        """Moves the control to this stage and adds up the time that the block takes."""
        self._control.stage = stage
        began = loop_time()
        try:
            yield
        finally:
            self.seconds[stage.value] = self.seconds.get(stage.value, 0.0) + loop_time() - began

    def ended(self, outcome: RoundOutcome, reason: str, result: RoundResult | None = None) -> RoundFinished:
        """`result`: of a round that committed."""
        group = self.group
        return RoundFinished(
            round_id=group.group_id.hex() if group is not None else "",
            purpose=self._purpose,
            outcome=outcome,
            reason=reason,
            epoch=self._control.request.epoch,
            leader=group.leader.text if group is not None else "",
            members=tuple(member.peer_id.text for member in group.members) if group is not None else (),
            contributors=tuple(peer.text for peer in result.contributors) if result is not None else (),
            left_out={peer.text: why for peer, why in result.left_out.items()} if result is not None else {},
            bytes_sent=result.bytes_sent if result is not None else 0,
            bytes_received=result.bytes_received if result is not None else 0,
            seconds=dict(self.seconds),
        )


def check_weight(weight: float) -> None:
    """Raises TypeError or ValueError unless reducers accept this weight."""
    check_numbers(weight=weight)
    if weight != 0 and not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight must be 0, or {MIN_WEIGHT} to {MAX_WEIGHT}, got {weight!r}")


def encode_gathered(value: Any, most: int = MAX_GATHERED_BYTES) -> bytes:
    """The value as it goes to the members of a group. Raises ValueError for more than `most` bytes."""
    data = b"" if value is None else wire.encode(value)
    if len(data) > most:
        raise ValueError(f"gather has {len(data)} bytes when encoded, the bound is {most}")
    return data
