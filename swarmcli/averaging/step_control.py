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
from swarmcli.network.bounds import MAX_TAG_BYTES
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import SwarmFuture, loop_time
from swarmcli.network.wire.messages import MOST

T = TypeVar("T")


class AveragingStage(Enum):
    """How far a round has come."""

    IDLE = "idle"  # not begun yet
    LOOKING_FOR_GROUP = "looking for group"
    AWAITING_TRIGGER = "awaiting trigger"  # the group has begun; `allow_allreduce` has not been called
    RUNNING_ALLREDUCE = "running all-reduce"
    FINISHED = "finished"  # with a result, an error, or cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRequest:
    """What the caller wants of one round. Raises ValueError or TypeError for values that make no sense."""

    tag: bytes = b""  # lineage: only peers with equal tags form groups
    gather: Any = None  # goes to every member of the group; anything msgpack carries
    weight: float = 1.0  # of this peer's tensors; 0: takes part and adds nothing
    timeout: float | None = None  # seconds for finding a group, over all tries; None: no bound
    lookout: float | None = None  # seconds to wait while somebody is missing; None: min_matchmaking_time
    scheduled_time: float | None = None  # swarm time before which the group does not begin
    require_trigger: bool = False  # the all-reduce waits for `StepControl.allow_allreduce`, too
    allow_retries: bool = True  # look for another group when one fails
    target: float | None = None  # of a preformed group: it begins when its members' progress sums up to this
    weighs: bool = False  # weights count what progress counts: members that hand in too little fail it, see `Pledges`
    sends: bool = True  # in a preformed group: False for a peer that only follows the run, and has weight zero
    # There is to be one round of this tag: if another group of it, as large, has begun, this search ends with
    # RoundMissed. A peer has had that round if it begins a search under another tag after `since` (swarm time).
    only_one: bool = False
    since: float | None = None
    epoch: int = -1  # for events only
    queue: Sequence[PeerID] = ()  # members of the round that led to the tag, in the order in which they lead, or ()
    terms: Mapping[str, str] = field(default_factory=dict)  # members must have equal ones, or hear which differ

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
    """A future without `cancel`: a caller that gives up waiting ends only its own waiting."""

    def cancel(self) -> bool:
        return False

    def never(self) -> None:
        """It will not happen any more: those who wait for it see a cancellation. Without effect once it is done."""
        super().cancel()


class StepControl:
    """One round under way. Any thread may use its methods and properties, any event loop may `await` it.

    Awaiting it, or `result`, gives the RoundResult or raises MatchmakingError, NoReducerError, FingerprintError,
    RoundFailed (tensors untouched at every member), RoundUndecided (untouched here), or CancelledError.
    """

    def __init__(self, request: RoundRequest, clock: Clock) -> None:
        """AveragerCore.begin_round makes it, on the loop of the averager."""
        self.request = request
        self.allow_retries = request.allow_retries
        self.begun: Milestone[Group] = Milestone()  # its group has begun; or the error with which the search ended
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._clock = clock
        self._future: Milestone[RoundResult] = Milestone()
        self._started = clock.now()
        self.stage = AveragingStage.IDLE
        self.group: Group | None = None  # the last group that began with this peer, even if its try failed
        self._weight = float(request.weight)
        self.samples: float | None = None  # from which the tensors were computed; None: equal to the weight
        self._scheduled_time = request.scheduled_time
        self.progress = 0.0  # as last reported
        self.urgent = asyncio.Event()  # the last report goes out at once
        self._trigger = asyncio.Event()
        self.began_allreduce = False  # from the trigger on, when the weight is settled
        self.task: asyncio.Task[None] | None = None  # runs the round; `cancel` cancels it
        self.listener: Callable[[], None] | None = None  # called after each report or new schedule
        if not request.require_trigger:
            self._trigger.set()

    # For the caller

    @property
    def triggered(self) -> bool:
        """Whether the all-reduce may begin as soon as there is a group."""
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
        """Tells how much this peer has done so far, in sum, towards the preformed group's target. Less than before has
        no effect."""
        if not (math.isfinite(progress) and progress >= 0):
            raise ValueError(f"progress must be finite and not negative, got {progress!r}")
        if progress > self.progress:
            self.progress = min(float(progress), MOST)  # others refuse more
            self._on_loop(self._notify)

    def hurry(self) -> None:
        """Sends the last report to the leader at once: this peer now only waits for the group."""
        self._on_loop(self.urgent.set)

    def allow_allreduce(self) -> None:
        """Tells that this peer's tensors and weight are ready. Without `require_trigger` they are from the start."""
        self._on_loop(self._trigger.set)

    def cancel(self) -> bool:
        """Leaves the search or the round; the other members go on. Returns False if the round has ended already."""
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
        """Waits for the end; returns the error, or None. TimeoutError after `timeout` seconds. Not for the loop's own
        thread."""
        return self._future.exception(timeout)

    def result(self, timeout: float | None = None) -> RoundResult:
        """Waits for the end. TimeoutError after `timeout` seconds; the round goes on. Not for the loop's own thread."""
        return self._future.result(timeout)

    async def outcome(self) -> Outcome:
        """Waits for the result, or why there is none: a round that was cancelled, or found no group, has failed.
        Cancelling this coroutine does not cancel the round."""
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
        """Returns the weight, which nobody can change from then on."""
        await self._trigger.wait()
        self.began_allreduce = True
        return self._weight

    def finish(self, outcome: RoundResult | Exception | None) -> None:
        """Ends the round with a result or an error; None: it was cancelled. A result that it has already stays."""
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
    """What happens in one try at a round, for its RoundFinished event. `group` is set once there is one."""

    def __init__(self, control: StepControl, purpose: str) -> None:
        self.seconds: dict[str, float] = {}
        self.group: Group | None = None
        self._control, self._purpose = control, purpose

    @contextmanager
    def stage(self, stage: AveragingStage) -> Iterator[None]:
        """Moves the control to this stage and adds the time that the block takes to `seconds`."""
        self._control.stage = stage
        began = loop_time()
        try:
            yield
        finally:
            self.seconds[stage.value] = self.seconds.get(stage.value, 0.0) + loop_time() - began

    def ended(self, outcome: RoundOutcome, reason: str, result: RoundResult | None = None) -> RoundFinished:
        """Returns the event. `result`: of a round that committed."""
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
    """Raises TypeError or ValueError for a weight that reducers refuse."""
    check_numbers(weight=weight)
    if weight != 0 and not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight must be 0, or {MIN_WEIGHT} to {MAX_WEIGHT}, got {weight!r}")


def encode_gathered(value: Any, most: int = MAX_GATHERED_BYTES) -> bytes:
    """Encodes a member's `gather` for the others. Raises ValueError for more than `most` bytes."""
    data = b"" if value is None else wire.encode(value)
    if len(data) > most:
        raise ValueError(f"gather has {len(data)} bytes when encoded, the bound is {most}")
    return data
