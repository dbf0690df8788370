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
CALM = 30.0  # without more peers than one group may hold, after which one group ends the epochs again
LEFT_BEHIND = 1.0  # for which a peer looks for others that are left over, once the rest has gone on

# How a peer keeps its place in the group of its lineage, in seconds
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 1.0  # between a group that fell apart and the next, twice as long each time
PATIENCE_WITH_BEGUN = 60.0  # for which a lineage's round that began without this peer keeps it from another


class EpochRule:
    """When an epoch is over for one peer. `samples` are its own, towards the next round.

    As long as all peers of a lineage fit into one group, its leader knows what all of them have. With more of them (one
    group holds `size`) the progress reports say when the epoch is over, and several groups end it, one after the
    other, within moments. A peer for which no group has room steps with its own gradients when nobody has come for
    `patience` seconds; the averaging of states brings it back.

    The number of peers changes while a run goes on, and each peer goes by its own count until a round begins. Where
    counts differ that costs moments: a leader that sums up samples also begins when a member says that the reports
    suffice. What the round means for the lineage its members decide together (`are_several`). Where two groups decide
    differently, their lineages part, and the rule for lineages brings them together again.
    """

    def __init__(
        self,
        tracker: ProgressTrackerCore,
        size: int | None = None,
        others: Callable[[], Sized] = tuple,
        patience: float = math.inf,
    ) -> None:
        """`others`: the peers that are there beside this one."""
        self.target = tracker.target_batch_size
        self._tracker, self._size, self._others, self._patience = tracker, size, others, patience
        self._crowded_at = -math.inf  # loop time; when there were last more than fit into one group
        self._over = -1, 0.0  # which epoch has been seen to be over, and since when (loop time)

    @property
    def several(self) -> bool:
        """Whether, as far as this peer can tell, several groups end the epoch: more peers are there than fit into one,
        or were CALM seconds ago, since going back to one group costs everyone a download."""
        if self._size is not None and 1 + len(self._others()) > self._size:
            self._crowded_at = loop_time()
        return loop_time() - self._crowded_at < CALM

    def told(self, samples: int) -> float:
        """Returns what the leader of the group hears; it begins the round when its members' sum reaches the target."""
        if not self.several:
            return samples
        return self.target if self._seconds_over >= 0 else 0.0

    def suffices(self, samples: int) -> bool:
        """Whether this peer may end the epoch although no round begins."""
        if not self.several:
            return samples >= self.target
        left_behind = self._tracker.global_epoch > self._tracker.local_progress.epoch
        return self._seconds_over >= min(LEFT_BEHIND if left_behind else math.inf, self._patience)

    def excuses(self, own: LineagePosition, leading: LineagePosition) -> bool:
        """Whether this peer may stay on its way although another position leads: another group has ended this epoch a
        moment earlier."""
        return self.several and leading == own.by_epoch(self.target)

    @property
    def _seconds_over(self) -> float:
        """Since the reports said that this epoch is over; -inf: they have not."""
        tracker, epoch = self._tracker, self._tracker.local_progress.epoch
        if self._over[0] != epoch and (tracker.accumulated_enough_samples or tracker.global_epoch > epoch):
            self._over = epoch, loop_time()
        return loop_time() - self._over[1] if self._over[0] == epoch else -math.inf


class PreformedGroup:
    """Keeps this peer in a group of its lineage. Progress goes to the group's leader, who says when to begin.

    One task, `_forming`, ends when a round begins with this peer; `contribute` brings that round to its end. A group
    that falls apart is formed again, with growing pauses, until a round commits, this peer loses sight of an outcome or
    hears that the others have begun without it (`undecided`), or the group is closed.
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
        self._begun_at = 0.0  # swarm time; of the last round that began
        self._samples = 0.0
        self._enough_since = math.inf  # since when the reports of all have had enough samples for the epoch
        self._gives_up_after = config.matchmaking_time  # seconds from then, the leader; doubled each time
        self._missed = b"", 0.0  # the lineage whose round began without this peer, since when
        self._over = False  # this peer leaves the run
        self.undecided = ""  # why this peer has to find out where the run is
        self.refused: FingerprintError | None = None  # by everyone else in the run
        self.position: LineagePosition | None = None  # whose group is kept
        self._since = 0.0  # swarm time; the others still were at this position, as far as this peer knew
        self._pauses: Iterator[float] = iter(())  # between groups that fall apart
        self.last: Group | None = None  # the last one that began with this peer
        self._queue: tuple[bytes, Sequence[PeerID]] = b"", ()  # of which lineage, who leads next; see RoundRequest

    def open(self, position: LineagePosition, note: MemberNote | None = None, since: float | None = None) -> None:
        """Begins to form a group of this lineage, unless one is kept already. The former one must be closed. Without
        effect after `leave`.

        `note`: what every member of the group is to know of this peer.
        `since`: the swarm time at which this peer asked where the others are; None: now. They may have stepped before
        it opens the group: who began to look for the next one since then has had this one's round.

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
            control.cancel()  # without effect on one that has ended
        self.position = None

    async def leave(self) -> None:
        """Closes for good: a step that is under way while this peer leaves the run opens no other group."""
        self._over = True
        await self.close()

    def report(self, samples: float) -> None:
        """This peer has so many samples of the epoch by now; the leader learns it in the background."""
        self._samples = samples
        if self._control is not None:
            self._control.report(samples)
        self._heed_reports()

    def _heed_reports(self) -> None:
        """A leader hears of samples before they are reported. So where the reports have enough of them and no round
        begins, whoever has them has no seat, or the leader does not begin: the one gets its seat back, the other is
        given up in the end: by the reports of those with whom this peer has come here or is in a group, since strangers
        could say so for ever, and ever more seldom within a lineage, since these may lie as well. They also count the
        samples of who was killed, until that report is a minute old."""
        position = self.position
        if self.begun or position is None:
            return
        reported, (lineage, queue) = self._tracker.reported(position.epoch), self._queue
        if self.averager.finder.experience.count(reported) < self._config.target_batch_size:
            self._enough_since = math.inf
            return
        self._enough_since = min(self._enough_since, loop_time())
        waited = loop_time() - self._enough_since
        self.averager.finder.admit_doubted(waited)
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
        """Whether the round has begun, so that the others wait for this peer's gradients."""
        control = self._control
        return control is not None and control.group is not None

    def is_overdue(self, seconds: float) -> bool:
        """Whether a round began so long ago and this peer has not begun its part, or the outcome was lost here. A round
        under way may take many times as long where links are slow. For any thread."""
        control = self._control
        waits = control is not None and control.group is not None and not control.began_allreduce
        return bool(self.undecided) or (waits and self._clock.now() > self._begun_at + seconds)

    @property
    def members(self) -> list[PeerID]:
        """The members of the group that this peer is in at present, itself among them."""
        group = self._control.group if self._control is not None else None
        return [member.peer_id for member in group.members] if group is not None else []

    async def wait_until_begun(self, timeout: float) -> bool:
        """Waits at most so long. Raises FingerprintError if all others refuse this peer."""
        if self.refused is not None:
            raise self.refused
        self._heed_reports()
        if self._control is not None:
            self._control.hurry()
        if self._forming is None or (self._forming.done() and not self.begun):
            await asyncio.sleep(timeout)  # no group forms: whoever asks again and again takes no whole processor
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
        """Lets the round that has begun use the averager's tensors as they are now; waits for its outcome. If it is
        dead, the group forms again. Cancelling this leaves the round as it is: another call waits for its outcome."""
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
        """Forms one group after the other, until a round begins, or has begun without this peer."""
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
            except Exception as error:  # as after a round that failed: otherwise no group would form any more
                tell_fault("the group that ends the epoch", error, self.averager.node.endpoint.events)
                pause = AFTER_A_FAULT

    def _request(self, position: LineagePosition) -> RoundRequest:
        # Two rounds of one lineage would fork it. But who merely says that he has begun holds nobody up for good.
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
