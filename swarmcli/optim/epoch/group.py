"""The group in which a peer will end its epoch: formed while the epoch is computed, and kept until it is used."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from swarmcli.averaging import RoundRequest
from swarmcli.errors import AveragingError, FingerprintError, RoundMissed, RoundUndecided
from swarmcli.network.identity import PeerID
from swarmcli.network.tasks import TaskOwner
from swarmcli.optim.modes.base import Committed, Failed, Outcome, Undecided
from swarmcli.optim.state.drift import are_apart, are_several, read_told
from swarmcli.optim.state.lineage import MAX_COUNT, LineagePosition

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerCore, RoundResult, StepControl

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 1.0  # seconds between a group that fell apart and the next try
PATIENCE_WITH_BEGUN = 60.0  # seconds for which a lineage's round that began without this peer keeps it from another
T = TypeVar("T")
logger = logging.getLogger(__name__)


class PreformedGroup:
    """Keeps this peer in a group of its lineage. Progress goes to the group's leader, who says when to begin.

    A group that falls apart is formed again, with growing pauses, until a round commits, this peer loses sight of
    an outcome or hears that the others have begun without it (`undecided`), or the group is closed.
    """

    def __init__(
        self,
        averager: AveragerCore,
        target_batch_size: int,
        terms: Mapping[str, str],
        tasks: TaskOwner,
        gather: Callable[[], Any] = lambda: None,
        *,
        sees_weights: bool = True,
    ) -> None:
        """`gather` gives what every member of the group is to know of this peer; it is asked whenever one forms.

        `sees_weights` is off for an auxiliary to which it does not matter whose samples are in a round: where it
        reduced nothing itself, as of a single part, it cannot tell.
        """
        self._sees_weights = sees_weights
        self._averager = averager
        self._gather = gather
        self._target = target_batch_size
        self._terms = terms
        self._tasks = tasks
        self._keeper: asyncio.Task[None] | None = None
        self._control: StepControl | None = None
        self._ended: asyncio.Future[Outcome] | None = None  # of the control
        self._begun = asyncio.Event()
        self._begun_at = 0.0  # loop time; of the last round that began
        self._time: Callable[[], float] = float  # the loop's, for threads that have none
        self._samples = 0.0
        self._missed: tuple[bytes, float] | None = None  # the lineage whose round began without this peer, since when
        self.undecided = ""  # why, once an outcome is not known here
        self.refused: FingerprintError | None = None  # by everyone else in the run
        self.position: LineagePosition | None = None  # whose group is kept

    def open(self, position: LineagePosition) -> None:
        """Begins to form a group of this lineage, unless one is kept already. The former one must be closed.

        Raises FingerprintError once all others have refused this peer.
        """
        if self.refused is not None:
            raise self.refused
        if self._keeper is not None:
            return
        self.position, self.undecided, self._samples = position, "", 0.0
        self._keeper = self._tasks.spawn(self._keep(position))

    async def close(self) -> None:
        """Leaves the group, if there is one. A round that has begun goes on without this peer."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait([keeper])
        self.position = None

    def report(self, samples: float) -> None:
        """This peer has so many samples of the epoch by now; the leader learns it in the background."""
        self._samples = samples
        if self._control is not None:
            self._control.report(samples)

    @property
    def begun(self) -> bool:
        """Whether the round has begun, so that the others wait for this peer's gradients."""
        return self._begun.is_set()

    def is_overdue(self, seconds: float) -> bool:
        """Whether a round began so long ago and its outcome is not known here, or it was lost. For any thread."""
        return bool(self.undecided) or (self.begun and self._time() > self._begun_at + seconds)

    @property
    def members(self) -> list[PeerID]:
        """Of the group that this peer is in at present, itself among them."""
        group = self._control.group if self._control is not None else None
        return [member.peer_id for member in group.members] if group is not None else []

    @property
    def gathered(self) -> dict[PeerID, bytes]:
        """What the members of the round that has begun handed to `gather`, encoded: strangers' words. Empty before.

        The leader is first; auxiliaries, which have no state to tell of, are not in it.
        """
        group = self._control.group if self._control is not None and self.begun else None
        members = group.members if group is not None else ()
        return {member.peer_id: member.gathered for member in members if not member.auxiliary}

    async def wait_until_begun(self, timeout: float) -> bool:
        """Waits at most so long. Raises FingerprintError if all others refuse this peer."""
        if self.refused is not None:
            raise self.refused
        if self._control is not None:
            self._control.hurry()
        try:
            async with asyncio.timeout(timeout):
                await self._begun.wait()
        except TimeoutError:
            return False
        return True

    async def unless_begun(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` returns; None, and the work is cancelled, if the round begins first."""
        task = asyncio.get_running_loop().create_task(work)
        begun = asyncio.get_running_loop().create_task(self._begun.wait())
        try:
            await asyncio.wait([task, begun], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for each in (task, begun):
                each.cancel()
            await asyncio.wait([task, begun])

    async def contribute(self, weight: float) -> Outcome:
        """Lets the round that has begun use the averager's tensors as they are now; waits for its outcome."""
        control, ended = self._control, self._ended
        if control is None or ended is None or not self.begun:
            return Failed("the group fell apart before it began")
        control.weight = weight
        control.allow_allreduce()
        return await asyncio.shield(ended)

    async def _keep(self, position: LineagePosition) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                outcome = await self._run_one(position)
            except FingerprintError as error:
                self.refused = error
                return
            if isinstance(outcome, Undecided):
                self.undecided = outcome.reason
            if not isinstance(outcome, Failed):
                return
            logger.debug("the group of epoch %d fell apart: %s", position.epoch, outcome.reason)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _run_one(self, position: LineagePosition) -> Outcome:
        request = RoundRequest(
            tag=position.lineage,
            gather=self._gather(),
            weight=0.0,
            require_trigger=True,
            allow_retries=False,
            target=float(self._target),
            only_one=self._yields_to_others(position.lineage),
            epoch=position.epoch,
            terms=self._terms,
        )
        control = self._control = self._averager.begin_round(request)
        ended = self._ended = asyncio.get_running_loop().create_future()
        try:
            control.report(float(self._samples))
            control.begun.add_done_callback(lambda _: self._has_begun(control))
            outcome = await self._outcome(control)
            ended.set_result(outcome)
            return outcome
        finally:
            self._control = None
            self._begun.clear()  # at once: who sees a round that has begun asks for its outcome, again and again
            control.cancel()  # without effect on one that has ended
            if not ended.done():
                ended.set_result(Failed("the group was left"))

    def _has_begun(self, control: StepControl) -> None:
        if control is self._control and not control.begun.cancelled():
            self._time = asyncio.get_running_loop().time
            self._begun_at = self._time()
            self._begun.set()

    async def _outcome(self, control: StepControl) -> Outcome:
        # Not `await control`: cancelling that would cancel its future, and the round behind it would run on.
        ended = asyncio.Event()
        control.add_done_callback(lambda _: ended.set())
        await ended.wait()
        if control.cancelled():
            return Failed("the round was cancelled")
        try:
            result = control.result(timeout=0)
            committed = self._committed(result)
            if not committed.members or (self._sees_weights and result.total_weight <= 0):
                return Failed(f"nobody in the group had samples: {result.remark}")
            return committed
        except RoundMissed as error:
            lineage = control.request.tag
            if self._missed is None or self._missed[0] != lineage:
                self._missed = (lineage, asyncio.get_running_loop().time())
            return Undecided(str(error))
        except RoundUndecided as error:
            return Undecided(str(error))
        except AveragingError as error:
            return Failed(str(error))

    def _yields_to_others(self, lineage: bytes) -> bool:
        """Two rounds of one lineage would fork it. But who merely says that he has begun holds nobody up for good."""
        if self._missed is None or self._missed[0] != lineage:
            return True
        return asyncio.get_running_loop().time() < self._missed[1] + PATIENCE_WITH_BEGUN

    def _committed(self, result: RoundResult) -> Committed:
        members = result.group.members
        bounded = self._averager.config.matchmaking.target_group_size is not None  # otherwise nobody has a say in it
        told = list(read_told(member.gathered for member in members)) if bounded else []
        return Committed(
            result.group.group_id,
            min(round(result.total_weight), MAX_COUNT),
            tuple(result.contributors),
            dict(result.left_out),
            tuple(member.peer_id for member in members if not member.auxiliary),
            tuple(member.peer_id for member in members if member.auxiliary),
            several=are_several(told),
            apart=are_apart(told),
        )
