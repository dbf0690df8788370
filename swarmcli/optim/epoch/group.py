"""When an epoch is over, and the group in which a peer will end it: formed while the epoch is computed, and kept."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence, Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from swarmcli.averaging import RoundRequest, RoundResult
from swarmcli.averaging.round.result import Outcome
from swarmcli.backoff import growing
from swarmcli.errors import AveragingError, FingerprintError, RoundFailed, RoundMissed, RoundUndecided
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.task_owner import AFTER_A_FAULT, TaskOwner, tell_fault
from swarmcli.optim.config import OptimizerConfig
from swarmcli.optim.epoch.note import MemberNote, are_apart, are_several, read_told
from swarmcli.optim.gradients.accumulator import Weighed
from swarmcli.optim.state.lineage import LineagePosition

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerCore, StepControl
    from swarmcli.averaging.group import Group
    from swarmcli.optim.peers.progress import ProgressTrackerCore

T = TypeVar("T")
logger = logging.getLogger(__name__)


# How several groups end an epoch, in seconds
CALM = 30.0  # with no more peers than one group may hold, after which one group ends the epochs again
LEFT_BEHIND = 1.0  # for which a peer without a group looks for others, once the rest has gone on

# How a peer stays in the group of its lineage, in seconds
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 1.0  # between a group that fell apart and the next, twice as long each time
PATIENCE_WITH_BEGUN = 60.0  # for which this peer enters no other round of a lineage after one began without it


class EpochRule:
    """When an epoch is over for one peer. `samples` are its own, towards the next round.

    As long as all peers of a lineage fit into one group, its leader knows the samples of all. With more peers than
    `size` the progress reports say when the epoch is over, and several groups end it, each within moments of the
    others. A peer for which no group has room steps with its own gradients when nobody has come for `patience` seconds;
    the averaging of states brings it back.

    The number of peers changes while a run goes on, and each peer goes by its own count until a round begins. If counts
    differ, that costs moments: a leader that sums up samples also begins when a member says that the reports suffice.
    The round's members decide together what it means for the lineage (`are_several`). If two groups decide differently,
    their lineages part, and the rule for lineages brings them together again.
    """

    def __init__(
        self,
        tracker: ProgressTrackerCore,
        size: int | None = None,
        others: Callable[[], Sized] = tuple,
        patience: float = math.inf,
    ) -> None:
        """`size`: the most members of a group; None: no bound. `others` returns the other peers that are there.
        `patience`: seconds."""
        self.target = tracker.target_batch_size
        self._tracker, self._size, self._others, self._patience = tracker, size, others, patience
        self._crowded_at = -math.inf  # loop time when there last were more peers than fit into one group
        self._over = -1, 0.0  # the epoch that reports have said to be over, and since when (loop time)

    @property
    def several(self) -> bool:
        """Whether, as far as this peer can tell, several groups end the epoch: there are more peers than fit into one
        group, or were within the last CALM seconds, since going back to one group costs everyone a download."""
        if self._size is not None and 1 + len(self._others()) > self._size:
            self._crowded_at = loop_time()
        return loop_time() - self._crowded_at < CALM

    def told(self, samples: int) -> float:
        """Returns the progress that the leader of the group hears from this peer; it begins the round when the sum over
        its members reaches the target."""
        if not self.several:
            return samples
        return self.target if self._seconds_over >= 0 else 0.0

    def suffices(self, samples: int) -> bool:
        """Whether this peer may end the epoch by itself, although no round begins."""
        if not self.several:
            return samples >= self.target
        left_behind = self._tracker.global_epoch > self._tracker.local_progress.epoch
        return self._seconds_over >= min(LEFT_BEHIND if left_behind else math.inf, self._patience)

    def excuses(self, own: LineagePosition, leading: LineagePosition) -> bool:
        """Whether this peer need not follow the position that leads: another group has ended this epoch a moment
        earlier.
        """
        return self.several and leading == own.by_epoch(self.target)

    @property
    def _seconds_over(self) -> float:
        """Seconds since the reports said that this epoch is over; -inf: they have not."""
        tracker, epoch = self._tracker, self._tracker.local_progress.epoch
        if self._over[0] != epoch and (tracker.accumulated_enough_samples or tracker.global_epoch > epoch):
            self._over = epoch, loop_time()
        return loop_time() - self._over[1] if self._over[0] == epoch else -math.inf


class PreformedGroup:
    """Keeps this peer in a group of its lineage, and tells its progress to the group's leader, who begins the round.

    One task, `_forming`, ends when a round begins with this peer; `contribute` brings that round to its end. If a group
    falls apart, this forms another, with growing pauses, until a round commits, until this peer cannot learn an outcome
    or hears that the others have begun without it (`undecided`), or until the group is closed.
    """

    def __init__(
        self,
        averager: AveragerCore,
        config: OptimizerConfig,
        tasks: TaskOwner,
        tracker: ProgressTrackerCore,
    ) -> None:
        self.averager, self._tracker = averager, tracker
        self._config, self._tasks = config, tasks
        self._note: MemberNote | None = None  # what every member of the group is to know of this peer
        self._forming: asyncio.Task[None] | None = None
        self._control: StepControl | None = None  # of the search under way, then of the round
        self._clock = averager.node.endpoint.clock
        self._begun_at = 0.0  # swarm time when the last round began
        self._samples = 0.0
        self._enough_since = math.inf  # loop time since when all reports together have enough samples for the epoch
        self._gives_up_after = config.matchmaking_time  # seconds later this peer gives up its leader; doubles each time
        self._missed = b"", 0.0  # the lineage whose round began without this peer, and since when (loop time)
        self._over = False  # this peer leaves the run
        self.undecided = ""  # why this peer has to find out where the run is
        self.refused: FingerprintError | None = None  # the error, if all others in the run refuse this peer
        self.position: LineagePosition | None = None  # for which this keeps a group
        self._since = 0.0  # swarm time when the others, as far as this peer knew, still were at this position
        self._pauses: Iterator[float] = iter(())  # before another group is formed
        self.last: Group | None = None  # the last one that began with this peer
        self._queue: tuple[bytes, Sequence[PeerID]] = b"", ()  # lineage, `queue` of its next round; see RoundRequest

    def open(self, position: LineagePosition, note: MemberNote | None = None, since: float | None = None) -> None:
        """Begins to form a group of this lineage, unless one is forming already. Close the group of an earlier position
        first. Without effect after `leave`.

        `note`: what every member of the group is to know of this peer.
        `since`: swarm time at which this peer asked where the others are; None: now. They may have stepped before it
        opens the group: a peer that has begun to look for the next group since then has had this one's round.

        Raises FingerprintError once all others have refused this peer.
        """
        if self.refused is not None:
            raise self.refused
        if self._forming is not None or self._over:
            return
        if self.last is not None and position.is_after(self.last.tag, self.last.group_id):
            leader, *others = (member.peer_id for member in self.last.members)
            self._queue = position.lineage, (*others, leader)
        self.position, self.undecided, self._samples, self._note = position, "", 0.0, note
        self._enough_since, self._gives_up_after = math.inf, self._config.matchmaking_time
        self._since = self._clock.now() if since is None else since
        self._pauses = growing(FIRST_PAUSE, LONGEST_PAUSE)
        self._forming = self._tasks.spawn(self._form(position))

    async def close(self) -> None:
        """Leaves the group, if there is one. A round that has begun goes on without this peer."""
        forming, self._forming = self._forming, None
        control, self._control = self._control, None
        if forming is not None:
            forming.cancel()
            await asyncio.wait([forming])
        if control is not None:
            control.cancel()  # without effect if its round has ended
        self.position = None

    async def leave(self) -> None:
        """Closes for good: even a step that is under way while this peer leaves the run opens no other group."""
        self._over = True
        await self.close()

    def report(self, samples: float) -> None:
        """This peer has `samples` samples of the epoch by now. The leader hears of them in the background."""
        self._samples = samples
        if self._control is not None:
            self._control.report(samples)
        self._heed_reports()

    def _heed_reports(self) -> None:
        """Acts on reports of enough samples if no round begins.

        The leader hears of samples before they are in reports. So either a suspect without a seat has them: it gets its
        seat back. Or the leader does not begin: this peer gives it up in the end. For that only reports of peers count
        with which this peer was in the last round or is in a group, since strangers could report enough for ever; and
        it happens more and more seldom within a lineage, since these may lie as well. A report of a killed peer counts,
        too, until it is a minute old.
        """
        position = self.position
        if self.begun or position is None:
            return
        reported, (lineage, queue) = self._tracker.reported(position.epoch), self._queue
        if self.averager.finder.experience.count(reported) < self._config.target_batch_size:
            self._enough_since = math.inf
            return
        self._enough_since = min(self._enough_since, loop_time())
        waited = loop_time() - self._enough_since
        self.averager.finder.admit_suspects(waited)
        if lineage == position.lineage:
            reported = {
                peer: samples for peer, samples in reported.items() if peer in {*queue, *self.averager.finder.company}
            }
        enough = self.averager.finder.experience.count(reported) >= self._config.target_batch_size
        if enough and waited > self._gives_up_after:
            self._gives_up_after *= 2
            self.averager.finder.give_up_leader()

    @property
    def begun(self) -> bool:
        """Whether the round has begun: the others wait for this peer's gradients."""
        control = self._control
        return control is not None and control.group is not None

    def is_overdue(self, seconds: float) -> bool:
        """Whether a round began more than `seconds` ago and this peer has not begun its part, or whether it has to find
        out where the run is. Once it takes part, a round may take many times as long on slow lines. For any thread."""
        control = self._control
        waits = control is not None and control.group is not None and not control.began_allreduce
        return bool(self.undecided) or (waits and self._clock.now() > self._begun_at + seconds)

    @property
    def members(self) -> list[PeerID]:
        """The members of this peer's present group, itself among them; none before a group has begun."""
        group = self._control.group if self._control is not None else None
        return [member.peer_id for member in group.members] if group is not None else []

    async def wait_until_begun(self, timeout: float) -> bool:
        """Waits for the round to begin, `timeout` seconds at most. Returns whether it has. Raises FingerprintError if
        all others refuse this peer."""
        if self.refused is not None:
            raise self.refused
        self._heed_reports()
        if self._control is not None:
            self._control.hurry()
        if self._forming is None or (self._forming.done() and not self.begun):
            await asyncio.sleep(timeout)  # no group forms: a caller that asks in a loop must not fill a processor
        else:
            await asyncio.wait([self._forming], timeout=timeout)
        return self.begun

    async def unless_begun(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Returns the result of `work`; None, and the work is cancelled, if the round begins first."""
        task = asyncio.get_running_loop().create_task(work)
        waits = {task} if self._forming is None else {task, self._forming}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def contribute(self, handed: Weighed) -> Outcome:
        """Lets the round that has begun use the averager's tensors as they are now, and waits for its outcome. If the
        round is dead, another group forms. Cancelling this coroutine does not cancel the round: another call can wait
        for its outcome."""
        control, position = self._control, self.position
        if control is None or control.group is None or position is None:
            return RoundFailed("the group fell apart before it began")
        if not control.triggered:
            control.weight, control.samples = handed.weight, handed.samples
            control.allow_allreduce()
        outcome = self._judged(await control.outcome())
        if control is self._control:  # otherwise the group was closed meanwhile
            self._control = self._forming = None
            if isinstance(outcome, RoundUndecided):
                self.undecided = str(outcome)
            elif isinstance(outcome, RoundFailed):
                logger.debug("the group of epoch %d fell apart: %s", position.epoch, outcome)
                self._forming = self._tasks.spawn(self._form(position, next(self._pauses)))
        return outcome

    async def _form(self, position: LineagePosition, pause: float = 0.0) -> None:
        """Forms one group after the other, until a round begins with this peer, or has begun without it."""
        while True:
            await asyncio.sleep(pause)
            try:
                control = self._control = self.averager.begin_round(self._request(position))
                control.report(float(self._samples))
                self.last = await control.begun
                self._begun_at = self._clock.now()
                return
            except FingerprintError as error:
                self.refused = error
                return
            except RoundMissed as error:
                if self._missed[0] != position.lineage:
                    self._missed = position.lineage, loop_time()
                self.undecided = str(error)
                return
            except AveragingError as error:
                logger.debug("no group of epoch %d: %s", position.epoch, error)
                pause = next(self._pauses)
            except Exception as error:  # goes on as after a round that failed: otherwise no group would ever form again
                tell_fault("the group that ends the epoch", error, self.averager.node.endpoint.events)
                pause = AFTER_A_FAULT

    def _request(self, position: LineagePosition) -> RoundRequest:
        # Two rounds of one lineage would fork it. But a peer that only says it has begun may not hold up others for
        # ever.
        lineage, since = self._missed
        patient = lineage != position.lineage or loop_time() < since + PATIENCE_WITH_BEGUN
        return RoundRequest(
            tag=position.lineage,
            gather=self._note,
            weight=0.0,
            require_trigger=True,
            allow_retries=False,
            target=float(self._config.target_batch_size),
            weighs=self.averager.config.matchmaking.target_group_size is None,
            sends=self._config.description.role == "trainer",
            only_one=patient,
            since=self._since,
            epoch=position.epoch,
            terms=self._config.fingerprint,
            queue=self._queue[1] if self._queue[0] == position.lineage else (),
        )

    def _judged(self, outcome: Outcome) -> Outcome:
        if not isinstance(outcome, RoundResult):
            return outcome
        if not outcome.members or outcome.total_weight <= 0:
            return RoundFailed(f"nobody in the group had samples: {outcome.remark}")
        if outcome.group is None or self.averager.config.matchmaking.target_group_size is None:
            return outcome
        told = list(read_told(member.gathered for member in outcome.group.members))
        return replace(outcome, several=are_several(told), apart=are_apart(told))
