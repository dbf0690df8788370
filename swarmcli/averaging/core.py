"""AveragerCore: averages a list of tensors with other peers, round by round, on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import torch

from swarmcli.averaging.aggregators import Mean
from swarmcli.averaging.config import AveragerConfig
from swarmcli.averaging.find.finder import GroupFinder
from swarmcli.averaging.group import MAX_GATHERED_BYTES, Group
from swarmcli.averaging.round.allreduce import Allreduce
from swarmcli.averaging.round.archive import RoundArchive
from swarmcli.averaging.round.differences import ROOM_TO_TELL, Reference, ReferenceTold, common_reference
from swarmcli.averaging.round.pace import LAST, quickly, round_time
from swarmcli.averaging.round.plan import Layout, compression_term
from swarmcli.averaging.round.program import RoundProgram
from swarmcli.averaging.round.result import RoundResult
from swarmcli.averaging.round.service import AllreduceService
from swarmcli.averaging.step_control import (
    AveragingStage,
    Chronicle,
    RoundRequest,
    StepControl,
    encode_gathered,
)
from swarmcli.averaging.trust import PeerTrust
from swarmcli.averaging.weights import Pledges
from swarmcli.backoff import growing
from swarmcli.compression import NoCompression
from swarmcli.concurrency import on_executor
from swarmcli.dht.node import DHTNode
from swarmcli.errors import MatchmakingError, RoundFailed, RoundUndecided, SwarmError
from swarmcli.events import PeerRefused
from swarmcli.memory import ReusableBuffer
from swarmcli.network import wire
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time, offload
from swarmcli.network.task_owner import TaskOwner
from swarmcli.state.sharing import StateSharing
from swarmcli.state.snapshot import ChunkLayout, Snapshot, copied

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 4.0  # seconds between a round that failed and the next try, doubled each time
SHORTEST_TRY = 0.01  # seconds: with less time left to find a group, a failed round is not tried again

GetState: TypeAlias = Callable[[], Awaitable[tuple[Any, Sequence[torch.Tensor]]]]

logger = logging.getLogger(__name__)


class AveragerCore:
    """One averager. Its coroutines belong to one event loop; rounds look for their groups one after the other.

    It averages `tensors` in place. During the all-reduce of a round the core holds them exclusively; they change only
    when the round commits, all at once. A round that fails leaves them as they were. `finder` looks for groups,
    `sharing` hands out and downloads states, `layout` has the tensors' shapes and types.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        node: DHTNode,
        config: AveragerConfig,
        *,
        get_state: GetState | None = None,
        program: RoundProgram | None = None,
    ) -> None:
        """`get_state` gives the state that newcomers download, metadata and tensors that will not change; None: copies
        of the averaged tensors. `program`: the phases of each round; None: one all-reduce over all tensors. Raises
        ValueError for tensors that cannot be averaged, for a program with averaging_alpha below 1, and for one with an
        aggregator other than a mean.
        """
        if program is not None and config.averaging_alpha != 1.0:
            raise ValueError(f"averaging_alpha={config.averaging_alpha!r}: rounds of several phases need 1.0")
        if program is not None and not isinstance(config.allreduce.aggregator, Mean):
            raise ValueError(
                f"aggregator: {config.allreduce.aggregator.description} does not go with {program.description}, whose "
                "phases make an average only of means; use Mean()"
            )
        self.config = config
        self.node = node
        self.trust = PeerTrust.of(node.endpoint, config.run or config.prefix)
        self._tensors = list(tensors)
        self._lock = asyncio.Lock()
        self.layout = Layout.of(self._tensors, config.allreduce.compression, config.allreduce.tensor_infos)
        lossy = any(not isinstance(codec, NoCompression) for codec in self.layout.codecs)
        self._by_differences = config.by_differences and lossy
        self._reference = Reference()
        self.archive = RoundArchive(node.endpoint, config.prefix)
        self._service = AllreduceService(node.endpoint, config.prefix, self.trust, config.allreduce.trust)
        self._program = program
        self.finder = GroupFinder(
            node,
            config,
            self.layout,
            self._own_terms(),
            self.trust,
        )
        self._get_state = get_state or self._copy_tensors
        self._copies = ReusableBuffer()  # copies of the state for one download after another
        self.sharing = StateSharing(
            node,
            config.prefix,
            self._snapshot,
            donates=config.share_state,
            period=config.declare_state_period,
            courtesy=self.at_rest,
        )
        self._sending = 0.0  # seconds that the slowest member of a failed last round would have taken to send; else 0
        self._rounds = TaskOwner()
        self._running = False

    async def start(self) -> None:
        """Begins to answer others. Raises ValueError if the endpoint has an averager of this prefix already."""
        self.finder.start()
        self.trust.start()
        self._service.start()
        self.archive.start()
        self.sharing.start()
        self._running = True

    async def shutdown(self) -> None:
        """Cancels the searches and rounds under way and withdraws the declaration. Idempotent; leaves no task."""
        if self._running:
            self._running = False
            await self._rounds.close()
            await self._service.shutdown()
            self.archive.close()
            await self.sharing.stop()
            self._copies.forget()
            await self.finder.stop()
            await self.trust.stop()

    def begin_round(self, request: RoundRequest) -> StepControl:
        """Begins a round in the background. Raises ValueError for a `gather` beyond MAX_GATHERED_BYTES, RuntimeError
        while the averager is not running."""
        if not self._running:
            raise RuntimeError("this averager is not running")
        gathered = encode_gathered(request.gather, MAX_GATHERED_BYTES - self._by_differences * ROOM_TO_TELL)
        control = StepControl(request, self.node.endpoint.clock)
        task = self._rounds.spawn(self._run(control, gathered))
        control.task = task
        task.add_done_callback(lambda _: control.finish(None))  # for one that was cancelled before its first step
        return control

    @asynccontextmanager
    async def tensors(self) -> AsyncIterator[list[torch.Tensor]]:
        """Exclusive access to the tensors; waits for an all-reduce under way."""
        async with self._lock:
            yield self._tensors

    async def take_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Waits for an all-reduce under way; those that begin later average these tensors instead.

        The tensors may change even after a group has begun, before its trigger, if all its members change theirs alike.
        Not for averagers with a program. Raises ValueError, and changes nothing, for tensors that cannot be averaged.
        """
        async with self._lock:
            allreduce = replace(self.config.allreduce, tensor_infos=None)
            layout = Layout.of(tensors, allreduce.compression)
            self._tensors, self.layout = list(tensors), layout
            self.config = replace(self.config, allreduce=allreduce)
            self.finder.describe(layout, self._own_terms())

    async def at_rest(self) -> None:
        """Returns once no all-reduce is under way."""
        async with self._lock:
            return

    async def _snapshot(self) -> Snapshot:
        metadata, tensors = await self._get_state()
        named = {str(index): tensor for index, tensor in enumerate(tensors)}
        roles = {str(index): info.role for index, info in enumerate(self.config.allreduce.tensor_infos or ())}
        return Snapshot(b"", metadata, named, self.config.state_compression, roles)

    async def copied(self, tensors: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Returns copies of these tensors (None: of the averaged ones), made while no all-reduce is under way. They
        take the memory of the last copies, if nobody uses that any more."""
        async with self.tensors() as averaged:
            chosen = averaged if tensors is None else tensors
            named = {str(index): tensor for index, tensor in enumerate(chosen)}
            memory = self._copies.take((await offload(ChunkLayout.of, named)).nbytes)
            return list((await on_executor(memory.nbytes, copied, named, memory)).values())

    async def _copy_tensors(self) -> tuple[Any, Sequence[torch.Tensor]]:
        return None, await self.copied()

    def _own_terms(self) -> dict[str, str]:
        options = self.config.allreduce
        differences = " of differences" if self._by_differences else ""
        return {
            "averaging.method": "one all-reduce" if self._program is None else self._program.description,
            "averaging.tensors": self.layout.schema_hash.hex()[:16] + self.config.meaning,
            "averaging.compression": compression_term(options.compression, self.layout) + differences,
            "averaging.part_size_bytes": str(options.part_size_bytes),
            "averaging.trust": options.trust,
            "averaging.audit": repr(float(options.audit)),
            "averaging.aggregator": options.aggregator.description,
            "averaging.max_share": str(float(options.max_share)),
        }

    # A round

    async def _run(self, control: StepControl, gathered: bytes) -> None:
        timeout = control.request.timeout
        deadline = None if timeout is None else loop_time() + timeout
        try:
            control.finish(await self._try_until_committed(control, gathered, deadline))
        except SwarmError as error:
            control.finish(error)
        except Exception as error:
            control.finish(error)
            raise

    async def _try_until_committed(self, control: StepControl, gathered: bytes, deadline: float | None) -> RoundResult:
        """Tries again after a failure, while retries are allowed and time is left to find a group."""
        pauses = growing(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            try:
                return await self._try_once(control, gathered, deadline)
            except (MatchmakingError, RoundFailed) as error:
                # Timers may fire a trifle early; a try without time would fail at once, again and again.
                late = deadline is not None and loop_time() > deadline - SHORTEST_TRY
                if late or not control.allow_retries:
                    raise
                logger.debug("round of %s failed and is tried again: %s", self.config.prefix, error)
                if isinstance(error, RoundFailed):
                    suspects = list(map(PeerID, error.suspects))
                    self.finder.memory.miss(suspects)
                    # Beyond two only what this peer itself saw counts, see `_learn_from`: a liar may name all members.
                    if len(suspects) <= 2:
                        for peer in suspects:
                            self.trust.suspect(peer, "a round failed by it", seat=False, work=True)
            await asyncio.sleep(next(pauses))

    async def _try_once(self, control: StepControl, gathered: bytes, deadline: float | None) -> RoundResult:
        chronicle = Chronicle(control, self.config.prefix)
        emit = self.node.endpoint.events.emit
        try:
            result = await self._find_and_average(control, chronicle, gathered, deadline)
        except RoundUndecided as error:
            emit(chronicle.ended("undecided", str(error)))
            raise
        except SwarmError as error:
            # A preformed group that nobody came to is no round.
            if chronicle.group is not None or control.request.target is None:
                emit(chronicle.ended("failed", str(error)))
            raise
        if (why := result.left_out.get(self.node.peer_id)) is not None:
            logger.warning("not all tensors of this peer are in the average of %r: %s", self.config.prefix, why)
        emit(chronicle.ended("committed", result.remark, result))
        return replace(result, seconds=chronicle.seconds)

    async def _find_and_average(
        self, control: StepControl, chronicle: Chronicle, gathered: bytes, deadline: float | None
    ) -> RoundResult:
        reference = self._reference  # another round may end before this one and set a new one
        if self._by_differences:
            gathered = wire.encode(ReferenceTold(reference.round_id, gathered))
        with chronicle.stage(AveragingStage.LOOKING_FOR_GROUP):
            group = chronicle.group = await self.finder.find(control, gathered, deadline)
        self.trust.enter(member.peer_id for member in group.members)
        control.mark_begun(group)
        with self._service.expecting(group):
            result = await self._average(control, chronicle, group, reference)
        gathered_by = {each.peer_id: self._decode_gathered(each.peer_id, each.gathered) for each in group.members}
        return replace(result, gathered=gathered_by, averages=(), parts=())

    async def _average(
        self, control: StepControl, chronicle: Chronicle, group: Group, reference: Reference
    ) -> RoundResult:
        try:
            with chronicle.stage(AveragingStage.AWAITING_TRIGGER):
                weight = await control.wait_for_trigger()
                await self._lock.acquire()
        except asyncio.CancelledError:
            self._service.decline(group)
            raise
        try:
            with chronicle.stage(AveragingStage.RUNNING_ALLREDUCE):
                self.archive.make_room()
                # All members return here alike: both answers follow from what they have agreed on.
                if all(member.auxiliary for member in group.members):
                    reason = "only auxiliaries came, which have no tensors of their own"
                    return RoundResult(round_id=group.group_id, group=group, nothing=reason)
                if not self.layout.numel:
                    reason = "the averaged tensors have no elements"
                    return RoundResult(round_id=group.group_id, group=group, nothing=reason)
                nbytes, tensors = self.layout.nbytes, self._tensors
                by_differences = self._by_differences and common_reference(group) != b""
                if by_differences and not self.config.auxiliary:
                    tensors = await on_executor(nbytes, reference.subtracted_from, tensors)
                exact = self._by_differences and not by_differences
                waited = chronicle.seconds[AveragingStage.AWAITING_TRIGGER.value]
                round_, pledges = self._make_round(control, group, weight, tensors, exact, waited)
                result = await self._run_round(round_, pledges, preformed=control.request.target is not None)
                self.finder.experience.note(result.weights, (member.peer_id for member in group.members))
                if result.total_weight > 0 and result.averages:
                    averages = result.averages
                    if by_differences:
                        self._reference = await on_executor(nbytes, reference.moved, result.round_id, averages, tensors)
                        averages = self._reference.tensors
                    elif exact:
                        self._reference = await on_executor(nbytes, Reference.of, result.round_id, averages)
                    await on_executor(nbytes, self._apply, averages)
                    self.archive.keep(group.tag, result)
        finally:
            self._lock.release()
        return result

    async def _run_round(self, round_: Allreduce, pledges: Pledges | None, *, preformed: bool) -> RoundResult:
        began, withheld, failed = loop_time(), set[PeerID](), set[PeerID]()
        spoiled = False
        try:
            with self.finder.gauge.watching():
                result = await round_.run()
            failed = self._failed_reducers(round_, set(result.failed))
            self.trust.note_group(frozenset(member.peer_id for member in round_.group.members))
            self.finder.lines.note_committed(began, loop_time(), result.weights)
            spoiled = result.late or self.node.peer_id in result.left_out
            self._sending = 0.0
            return result
        except RoundFailed:
            self._sending = round_.lessons.slowest(loop_time() - began)
            failed = self._failed_reducers(round_, set(round_.lessons.failed))
            spoiled = not failed  # a reducer that fails may also send slowly: that says nothing of this peer's line
            if pledges is not None and pledges.withheld:
                # A member that was left out while it sent has withheld nothing: it was slow.
                withheld = pledges.withheld - (round_.lessons.sending.keys() & round_.left_out)
                self.finder.experience.note_short()
                # The leader listed them. They may have been killed, so the first time costs the leader nothing.
                if round_.group.leader != self.node.peer_id:
                    self.finder.suspect(round_.group.leader, "it led a round that fell short", lost=True, led=True)
            raise
        finally:
            gauge = self.finder.gauge
            # Nothing comes over a connection that is dead, however quick the line is.
            slow = spoiled and not round_.lessons.broke and gauge.shows and gauge.received
            self.finder.lines.receiving = self.finder.round_bytes / gauge.received if slow else 0.0
            if round_.misled:
                self.finder.suspect(round_.group.leader, round_.misled, lost=round_.by_accident, led=True)
            self._learn_from(round_, preformed, withheld, failed)

    def _failed_reducers(self, round_: Allreduce, failed: set[PeerID]) -> set[PeerID]:
        """Those of the `failed` that reduce. None of them if half of all reducers failed and no other member says so
        (`elsewhere`): then this peer's own line may be at fault."""
        shares = zip(round_.group.members, round_.group.part_shares, strict=True)
        reducers = {member.peer_id for member, share in shares if share > 0}
        failed = failed & reducers - {self.node.peer_id}
        return set() if 2 * len(failed) >= len(reducers) and not round_.lessons.elsewhere else failed

    def _learn_from(
        self,
        round_: Allreduce,
        preformed: bool,
        withheld: Set[PeerID],
        failed: Set[PeerID],
    ) -> None:
        lessons = round_.lessons
        if self.finder.gauge.shows:
            self.finder.lines.note_sending(lessons.sending, round_.group.bids, self.finder.seconds_by_limits)
        withheld -= {self.node.peer_id}
        suspects = dict.fromkeys(withheld, "it claimed samples and handed in less than half")
        # If the leader has begun two groups, members wait for each other in vain, and are not at fault.
        if not self._service.has_split(round_.group):
            suspects |= lessons.suspects
        for peer, reason in suspects.items():
            if preformed and peer in lessons.sending and peer not in withheld:
                continue  # it was slow: the next round does not wait for its parts, see `seats.py`
            self.finder.suspect(peer, reason, work=peer in failed, lost=peer in lessons.lost | lessons.cut)
            failed -= {peer}
            if peer in withheld and self.trust.has_no_seat(peer):
                self.finder.experience.forget(peer)
        for peer in failed:
            self.trust.suspect(peer, "it failed as a reducer", seat=False, work=True)

    def _make_round(
        self,
        control: StepControl,
        group: Group,
        weight: float,
        tensors: Sequence[torch.Tensor],
        exact: bool,
        waited: float,
    ) -> tuple[Allreduce, Pledges | None]:
        target, pledges = control.request.target, None
        seats = self.finder.lines.seats(group.bids, target)
        usual = max((seconds for seconds, _ in self._service.took), default=0.0)
        if target is not None and control.request.weighs and not self.config.auxiliary:
            pledges = Pledges(self.finder.experience, group, target)
        options, planned = self.config.allreduce, seats.planned
        options = replace(
            options,
            compression=NoCompression() if exact else options.compression,
            allreduce_timeout=round_time(options.allreduce_timeout, max(planned, self._sending)),
            # A reducer has no average until the slowest sender has brought its first part, which may be all it sends.
            reducer_timeout=max(options.for_reducer, LAST * planned),
        )
        round_ = Allreduce(
            self._service,
            group,
            tensors,
            weight=weight,
            options=options,
            samples=control.samples,
            program=self._program,
            pledges=pledges,
            seats=seats,
            quickly=quickly(0.0 if target is None else max(usual, planned), self._sending),
            late=waited > options.to_begin / 2,
        )
        return round_, pledges

    @torch.no_grad()
    def _apply(self, averages: Sequence[torch.Tensor]) -> None:
        """Moves all tensors. With tensors of the group's shapes and types nothing here can fail half way."""
        alpha = self.config.averaging_alpha
        for tensor, average in zip(self._tensors, averages, strict=True):
            if alpha == 1.0:
                tensor.copy_(average)
            else:
                tensor.lerp_(average.to(tensor.device), alpha)

    def _decode_gathered(self, peer: PeerID, data: bytes) -> Any:
        if self._by_differences:
            data = ReferenceTold.read(data).gathered
        try:
            return wire.decode(Any, data) if data else None
        except msgspec.DecodeError as error:
            self.node.endpoint.events.emit(PeerRefused(peer.text, str(error), what="gathered data"))
            return None
