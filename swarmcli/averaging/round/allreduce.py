"""One round of averaging at one member: a butterfly all-reduce with one outcome for the whole group.

    inputs of a phase ─▶ exchange ─▶ averages ─▶ inputs of the next … ─▶ results, with a digest over all averages
    the digest ─▶ echo, vote ─▶ certificate: results count        otherwise nothing has changed

Sending, adding and receiving overlap. Inputs are only read; results lie in memory of their own. A member that lacks
some averages fetches the result from others that hold it; if nobody does, the group gives the round up.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from swarmcli.averaging.config import MAX_WEIGHT, MIN_WEIGHT, AllreduceOptions
from swarmcli.averaging.group import Group
from swarmcli.averaging.round.agreement import Agreement
from swarmcli.averaging.round.buffers import Average, Inputs, Results, contributions_to
from swarmcli.averaging.round.exchange import PartExchange
from swarmcli.averaging.round.messages import MAX_WORDS
from swarmcli.averaging.round.outcome import Action, Next
from swarmcli.averaging.round.pace import STALLED, Lessons, usual_time
from swarmcli.averaging.round.plan import Layout, Plan
from swarmcli.averaging.round.program import OnePhase, Phases, RoundProgram, advance
from swarmcli.averaging.round.reducer import beyond_sums
from swarmcli.averaging.round.result import RoundResult
from swarmcli.averaging.round.service import AllreduceService, phases_of
from swarmcli.averaging.seats import Seats
from swarmcli.averaging.weights import Pledges, WeightBounds, limits
from swarmcli.compression import CompressionInfo, TensorDescriptor
from swarmcli.compression.base import all_finite
from swarmcli.concurrency import beside, forgetful, on_all_processors, on_executor
from swarmcli.errors import RoundFailed, RoundUndecided
from swarmcli.network import PeerID
from swarmcli.network.loop_thread import loop_time


class Allreduce:
    """One round of one group at one member. Made and run once."""

    def __init__(
        self,
        service: AllreduceService,
        group: Group,
        tensors: Sequence[torch.Tensor],
        *,
        weight: float,
        options: AllreduceOptions | None = None,
        samples: float | None = None,
        program: RoundProgram | None = None,
        pledges: Pledges | None = None,
        seats: Seats | None = None,
        quickly: float = math.inf,
        late: bool = False,
    ) -> None:
        """`tensors` must not change until `run` has returned; those of an auxiliary, or beside a `program`, only tell
        shapes and types.

        weight    of this member's tensors in the mean; with zero it takes part and adds nothing. An auxiliary has none
        samples   from which the tensors were computed, if that is not the weight
        program   computes what is averaged in several phases, instead of the tensors
        pledges   what the members have claimed; nobody votes for a result that falls short of it
        seats     for whom this member waits; None: for all alike
        quickly   seconds for the round once all members have begun
        late      this member begins so late that others may have given it up

        Raises ValueError for a weight that is neither zero nor one that reducers accept, and for tensors that have
        no mean; KeyError if this peer is not in the group.
        """
        if weight != 0 and not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise ValueError(f"weight must be 0, or {MIN_WEIGHT} to {MAX_WEIGHT}, got {weight}")
        # These are known once `run` has ended, however it ended; `misled`: how the leader led badly.
        self.group, self.lessons = group, Lessons()
        self.left_out = frozenset[PeerID]()  # members that were left out of some part
        self.misled, self.by_accident = "", True  # `by_accident`: the leader may not be at fault
        self._auxiliary = group.members[group.index_of(service.endpoint.peer_id)].auxiliary
        self._service, self._options = service, options if options is not None else AllreduceOptions()
        self._tensors, self._weight = list(tensors), weight
        self._samples = samples if weight and samples != weight else None
        self._program = OnePhase(self._tensors) if program is None else program
        layout = Layout.of(tensors, self._options.compression, self._options.tensor_infos)
        self._time = self._options.allreduce_timeout or usual_time(layout.nbytes)
        self._ends_at = math.inf
        self._exchanges: list[PartExchange] = []  # one for each phase that has begun
        self._reducing: list[asyncio.Task[None]] = []
        self._results: list[torch.Tensor] | None = None  # None: not all averages are here
        self._digest: bytes | None = None  # of the results
        self._pledges, self._refused = pledges, ""  # `_refused`: why this member does not vote for the results
        self._how = seats or Seats(), quickly, late
        self._trouble, self._suspects = "", dict[PeerID, str]()  # why averages are missing here, and by whose fault
        self._late = False  # averages had to be fetched after the commit
        self._agreement: Agreement
        self.ended = False

    async def run(self) -> RoundResult:
        """Takes part until the round's outcome is known.

        Raises RoundFailed if it is proved that nobody can apply the round, RoundUndecided if this member cannot learn
        the outcome or get the committed result. Then it has no averages, and others may have them.
        """
        self._service.make_room()
        for member in self.group.members:
            if member.addresses:
                self._service.endpoint.learn(member.peer_id, member.addresses)
        committed, self._ends_at = False, loop_time() + self._time
        try:
            with self._service.hosting(self.group) as self._agreement:
                outcome = await self._take_part()
                committed = outcome.move == Action.COMMITTED
                return self._conclude(outcome)
        finally:
            self._let_go(committed)

    @forgetful
    async def _take_part(self) -> Next:
        try:
            async with beside(self._exchange_all()) as exchanging:
                outcome = await self._agreement.run(self, self._time)
                if outcome.move == Action.COMMITTED:
                    await self._finish(exchanging)
            if outcome.move == Action.COMMITTED and self._digest != outcome.digest:
                await self._catch_up(outcome.digest or b"")
            return outcome
        finally:
            for task in self._reducing:
                task.cancel()
            await asyncio.gather(*self._reducing, return_exceptions=True)

    # The phases

    @forgetful
    async def _exchange_all(self) -> None:
        """Goes through all phases, until averages are missing."""
        await (self._assist() if self._auxiliary else self._average())
        self.ended = True
        self._agreement.note_own()

    async def _average(self) -> None:
        phases = self._program.run(self.group.group_id)
        tensors, over = await self._compute(advance, phases, None)
        while not over:
            exchange = await self._begin(tensors)
            if not await exchange.gather():
                self._agreement.end_at(loop_time())
            if exchange.holdings.digest is not None:
                await exchange.audit()
            if exchange.holdings.digest is None or (exchange.audits is not None and exchange.audits.liars):
                self._trouble = exchange.faults.reason or "only some of its parts have senders"
                return
            if unlike := self._unlike():
                self._suspects = unlike
                names, why = ", ".join(peer.short for peer in unlike), next(iter(unlike.values()))
                self._trouble = f"{names} had not the same part in all phases: {why}"[:MAX_WORDS]
                return
            tensors, over = await self._go_on(phases)
        self._take(tensors)

    async def _assist(self) -> None:
        """Reduces in all phases, for an auxiliary, which does not hold the averages."""
        for indices in self._program.phases:
            exchange = await self._begin([self._tensors[index] for index in indices])
            await exchange.gather()
            if exchange.faults.reason:
                self._trouble = exchange.faults.reason
                return

    async def _begin(self, tensors: Sequence[torch.Tensor]) -> PartExchange:
        """Begins the exchange of the next phase."""
        number, options = len(self._exchanges), self._options
        if len(self._program.phases) > 1:  # a phase has the keys of its own tensors, and the time that is left
            infos = options.tensor_infos or [
                CompressionInfo(TensorDescriptor.of(tensor), index) for index, tensor in enumerate(self._tensors)
            ]
            infos = tuple(infos[index] for index in self._program.phases[number])
            left = max(self._ends_at - loop_time(), 0.001)
            options = replace(options, tensor_infos=infos, allreduce_timeout=left)
        group, mine, results = phases_of(self.group)[number], None, None
        layout = Layout.of(tensors, options.compression, options.tensor_infos)
        plan = Plan.make(layout, group.part_shares, options.part_size_bytes)
        if not self._auxiliary:
            inputs = tensors, self._weight, self._samples
            mine = await on_executor(layout.nbytes, _checked_inputs, *inputs)
            results = Results(layout, self._service.memory.take(layout.nbytes))
        exchange = PartExchange(self._service, group, self.group.group_id, plan, mine, results, options, *self._how)
        self._exchanges.append(exchange)
        self._service.host(exchange)
        self._reducing.append(asyncio.create_task(exchange.reduce()))
        return exchange

    async def _go_on(self, phases: Phases, number: int = -1) -> tuple[list[torch.Tensor], bool]:
        """Computes what follows from the averages of a phase: the next tensors, or the results and True. If nobody had
        any weight, there are no results."""
        holdings = self._exchanges[number].holdings
        assert holdings.results is not None
        if not any(average.senders for average in holdings.averages):
            return [], True
        return await self._compute(advance, phases, holdings.results.tensors())

    async def _compute(self, work: Callable[..., Any], *args: Any) -> Any:
        return await on_all_processors(self._program.nbytes, work, *args)

    def _unlike(self) -> dict[PeerID, str]:
        """In a round of several phases: members that are not in all parts of all phases with one weight → why. What
        follows from the averages is right only if all phases have the same members."""
        if len(self._program.phases) == 1:
            return {}
        averages = [average for exchange in self._exchanges for average in exchange.holdings.averages]
        entries = [dict(zip(average.senders, average.weights, strict=False)) for average in averages]
        unlike = {sender for entry in entries for sender, _ in entry.items() ^ entries[0].items()}
        left_out = {index: why for exchange in self._exchanges for index, why in exchange.left_out.items()}
        return {
            self.group.members[index].peer_id: left_out.get(index, "it had unlike parts in two phases")
            for index in sorted(unlike)
        }

    def _chain(self) -> bytes:
        """The digest over all phases so far; a single phase's own."""
        digests = [exchange.holdings.digest or b"" for exchange in self._exchanges]
        return digests[0] if len(digests) == 1 else hashlib.sha256(b"swarm phases" + b"".join(digests)).digest()

    def _take(self, results: list[torch.Tensor]) -> None:
        """All averages are here, and these are the results."""
        self._results, self._digest = results, self._chain()
        parts = self._exchanges[-1].holdings.averages if self._exchanges else ()
        self._refused = next(filter(None, (exchange.judge() for exchange in self._exchanges)), "")
        if self._pledges is not None and not self._refused:
            self._refused = self._pledges.refuses(contributions(self.group, parts, self._options)[1])
        self._trouble = self._refused or self._trouble

    # Answers to the agreement

    @property
    def digest(self) -> bytes | None:
        """The digest of the result that is here, if this member may vote for it."""
        lied = any(each.audits is not None and each.audits.liars for each in self._exchanges)
        return None if self._refused or lied else self._digest

    @property
    def lacks(self) -> tuple[str, tuple[int, ...]]:
        failed = set[int]().union(*(exchange.failed for exchange in self._exchanges))
        return self._trouble, tuple(sorted(failed))

    @property
    def lacking(self) -> int:
        return sum(len(each.holdings.plan.parts) - len(each.holdings.averages) for each in self._exchanges)

    @property
    def slow(self) -> set[int]:
        return set[int]().union(*(exchange.slow for exchange in self._exchanges))

    @forgetful
    async def obtain(self, digest: bytes, holder: int | None, *, last: bool = False) -> bool:
        """Takes the averages of all phases that are missing here from one member. `holder`: None if none is missing.
        `last`: see `Copier.copy`. Returns whether the result with this digest is here then."""
        self._digest, number = None, 0
        phases = self._program.run(self.group.group_id)
        tensors, over = await self._compute(advance, phases, None)
        while not over:
            if number == len(self._exchanges):  # this member has not begun this phase: copies do not bring that
                return False
            exchange = self._exchanges[number]
            if holder is not None and exchange.copier is not None:
                why = await exchange.copier.copy(holder, last=last)
                self._trouble = self._trouble or why
            if exchange.holdings.digest is None:
                return False
            tensors, over = await self._go_on(phases, number)
            number += 1
        self._take(tensors)
        return self._digest == digest

    # The end

    async def _finish(self, exchanging: asyncio.Task[None]) -> None:
        """After a commit: waits for the rest of the exchange and of this member's audits, as long as anything arrives,
        and within the time of the round.

        If it waited longer for a silent member, the others would have let go of the averages by then.
        """
        arrived, unfinished = -1, {exchanging, *self._reducing}
        while unfinished and arrived != self._bytes_received and loop_time() < self._ends_at:
            arrived = self._bytes_received
            _, unfinished = await asyncio.wait(unfinished, timeout=STALLED)
        for task in unfinished:
            task.cancel()  # or late averages could overwrite the copies
        await asyncio.wait({exchanging, *self._reducing})  # cancelled arithmetic goes on until it is done
        if exchanging not in unfinished:
            exchanging.result()

    @property
    def _bytes_received(self) -> int:
        return sum(exchange.bytes_received for exchange in self._exchanges)

    @forgetful
    async def _catch_up(self, digest: bytes) -> None:
        """Fetches missing parts of a committed result from others, within the time that a round may take. If its line
        is too slow for that, replaying the missed round is quicker."""
        if self._auxiliary:
            return
        for exchange in self._exchanges:
            await exchange.end()  # copies are written to the memory of its averages
        if await self.obtain(digest, None):  # all was here, and was still being checked
            return
        self._late = True
        await self._agreement.obtain(self, digest, set(), loop_time() + self._time)

    def _conclude(self, outcome: Next) -> RoundResult:
        """Returns the result, or raises. Nothing here refuses a committed result: such checks come before the vote."""
        if outcome.move == Action.DEAD:
            raise RoundFailed(self._reason, self._named())
        if outcome.move == Action.UNDECIDED:
            raise RoundUndecided(f"this peer does not learn what became of the round: {self._reason}")
        if not self._auxiliary and self._digest != outcome.digest:
            name = (outcome.digest or b"").hex()[:8]
            raise RoundUndecided(f"the group committed the result {name}, which did not come here in time")
        parts = tuple(self._exchanges[-1].holdings.averages) if self._exchanges else ()
        weights, samples, partly = contributions(self.group, parts, self._options)
        left_out = {index: why for exchange in self._exchanges for index, why in exchange.left_out.items()}
        named = {self.group.members[index].peer_id: reason for index, reason in left_out.items()}
        named = {peer: reason for peer, reason in named.items() if peer in partly or peer not in weights}
        return RoundResult(
            round_id=self.group.group_id,
            group=self.group,
            averages=self._results if weights and self._results is not None else (),
            weights=weights,
            samples=samples,
            left_out=partly | {peer: "; ".join(filter(None, [partly.get(peer), why])) for peer, why in named.items()},
            digest=outcome.digest or b"",
            bytes_sent=sum(exchange.bytes_sent for exchange in self._exchanges),
            bytes_received=self._bytes_received,
            parts=parts,
            late=self._late,
            failed=self._named(),
            certificate=self._agreement.outcome.certificate,
            reduced=_reduced(self.group, parts),
            shares=self.group.part_shares if len(self._program.phases) == 1 else (),
        )

    @property
    def _reason(self) -> str:
        told = (word.reason for word in self._agreement.told.values())
        return self._trouble or next(filter(None, told), "too many members are out of reach")

    def _named(self) -> tuple[PeerID, ...]:
        """Members by whose fault averages are missing: reducers that failed here or at more members than may lie,
        whoever signed unlike words, and, where somebody holds the result, whoever lacks it and names nobody."""
        quorum, failed = self._agreement.outcome.quorum, {*self.lacks[1]}
        tellers: dict[int, set[int]] = {}
        for teller, word in self._agreement.told.items():
            for member in word.failed if teller not in failed else ():  # the two accuse each other
                tellers.setdefault(member, set()).add(teller)
        named = {member for member, by in tellers.items() if quorum.weight(by) > quorum.hostile}
        named |= (failed | self._agreement.outcome.proofs.keys()) - {self._agreement.mates.me}
        if self._digest is not None or self._agreement.outcome.named:
            named |= {teller for teller, word in self._agreement.told.items() if word.reason and not word.failed}
        peers = {self.group.members[index].peer_id: "" for index in sorted(named) if index < len(self.group)}
        return tuple(peers | self._suspects)

    def _judge_leader(self) -> None:
        """Notes whether the leader may be at fault for a round without a result, by whom it listed or gave work."""
        outcome, mates = self._agreement.outcome, self._agreement.mates
        absent = {index for index in outcome.quorum.voters if not (outcome.met(index) or mates.is_connected(index))}
        failed = {index for exchange in self._exchanges for index in exchange.failed}
        alone = {index for exchange in self._exchanges for index in exchange.faults.untrue}
        if outcome.quorum.guarded and outcome.quorum.weight(absent) > outcome.quorum.hostile:
            self.misled, self.by_accident = "it listed members whom nobody can reach", False
        elif alone:
            self.misled, self.by_accident = "it gave work to a member that leaves others out", 0 not in alone
        elif any(0 in exchange.faults.refusing for exchange in self._exchanges):
            self.misled, self.by_accident = "it gave work to itself, and refused it", False
        elif any(not mates.is_connected(index) for index in failed - self._agreement.told.keys()):
            self.misled = "it gave work to somebody who is not there"

    def _let_go(self, committed: bool) -> None:
        """Frees the memory: errors hold on to the frames that they came through, and so to this object."""
        if not committed and hasattr(self, "_agreement") and self._agreement.mates.me:
            self._judge_leader()
        failed = set[int]()
        for exchange in self._exchanges:
            self.left_out |= {self.group.members[index].peer_id for index in exchange.left_out}
            self.lessons.add(exchange.leave(committed))
            failed |= exchange.failed
            holdings = exchange.holdings
            if holdings.results is None:
                continue
            if committed and holdings.digest is not None:
                self._service.keep(exchange.group.group_id, holdings)
            else:
                holdings.drop(range(len(holdings.plan.parts)))
                holdings.results.release()
        if hasattr(self, "_agreement"):
            told = (word.failed for index, word in self._agreement.told.items() if index not in failed)
            self.lessons.elsewhere = failed <= set[int]().union(*told)
        self._exchanges.clear()
        self._results = None
        del self._tensors, self._program


def _checked_inputs(tensors: Sequence[torch.Tensor], weight: float, samples: float | None = None) -> Inputs:
    """Returns the inputs. Tensors that cannot be averaged have weight zero, so nobody's average holds them."""
    inputs, wrong = Inputs(tensors, weight, samples), ""
    if weight > 0:
        finite = all(map(all_finite, inputs.each()))
        wrong = beyond_sums(inputs.each(), weight) if finite else "NaN or infinity"
    if wrong:
        inputs.weight, inputs.samples, inputs.note = 0.0, None, f"its tensors hold {wrong}"
    return inputs


def _reduced(group: Group, averages: Sequence[Average]) -> dict[PeerID, int]:
    """Reducer → bytes of the senders' tensors that it has added up, before compression."""
    sums = Counter[PeerID]()
    for average in averages:
        part, reducer = average.part, group.members[average.part.reducer].peer_id
        sums[reducer] += (part.stop - part.start) * part.segment.dtype.itemsize * len(average.senders)
    return dict(sums)


def contributions(
    group: Group, averages: Sequence[Average], options: AllreduceOptions
) -> tuple[dict[PeerID, float], dict[PeerID, float], dict[PeerID, str]]:
    """Returns contributor → its weight; → its samples; and, for one that is only in some parts, → how much of its
    tensors counts, in words. Weights and samples are those of the tensors that arrived. Samples are bounded here as
    reducers bound weights, by what all members hold, so that all members count the same."""
    found = {group.members[index].peer_id: each for index, each in contributions_to(averages).items()}
    weights = {peer: each.weight for peer, each in found.items()}
    samples = {peer: each.samples for peer, each in found.items()}
    partly = {peer: f"only {each.share:.0%} of its tensors count" for peer, each in found.items() if each.share < 1}
    if samples != weights:
        bounds = WeightBounds.of(group, range(len(group)), options)
        ramps = {group.members[index].peer_id: ramp for index, ramp in bounds.ramps.items()}
        most = limits(samples, ramps, bounds.max_share)
        samples = {peer: min(count, most[peer]) for peer, count in samples.items()}
    return weights, samples, partly
