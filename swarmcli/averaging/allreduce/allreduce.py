"""One round of averaging at one member: a butterfly all-reduce with one outcome for the whole group.

    own parts ─────────────────▶ own reducer ───▶ averages ──▶ everyone
    parts of others' shares ───▶ their reducers ─▶ averages ──▶ here        all at the same time, part by part
    everything is here ──▶ vote with its digest ──▶ the leader's decision ──▶ results are handed out, or not

Sending, adding and receiving overlap. Inputs are only read; results lie in memory of their own until the group has
decided, so a round that fails changes nothing. When members die, those who are left bring each other to one result
(`proposing.py`, `mending.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import torch

from swarmcli.averaging.agreement.agreement import Agreement
from swarmcli.averaging.agreement.ballot_messages import PrepareAnswer, Repair, RepairAnswer, VoteMessage
from swarmcli.averaging.agreement.mates import Mates
from swarmcli.averaging.agreement.outcome import Committed, Decision, conclude
from swarmcli.averaging.agreement.votes import RoundVotes
from swarmcli.averaging.allreduce.copying import Copier
from swarmcli.averaging.allreduce.exchange import Exchange, Gathered
from swarmcli.averaging.allreduce.holdings import Holdings
from swarmcli.averaging.allreduce.late import copy_committed, fetch_committed
from swarmcli.averaging.allreduce.layout import Layout, Plan
from swarmcli.averaging.allreduce.mending import Mending
from swarmcli.averaging.allreduce.messages import OpenExchange
from swarmcli.averaging.allreduce.patience import AllreduceOptions
from swarmcli.averaging.allreduce.reducer import MAX_WEIGHT, MIN_WEIGHT, beyond_sums
from swarmcli.averaging.allreduce.results import AllreduceResult, contributions, deputies_of
from swarmcli.averaging.allreduce.sending import Contribution
from swarmcli.averaging.allreduce.service import AllreduceService
from swarmcli.averaging.allreduce.vector import Inputs, Results
from swarmcli.averaging.group import Group
from swarmcli.averaging.state.kept_round import KeptRound
from swarmcli.averaging.tasks import Bell, beside, forgetful, on_executor
from swarmcli.errors import CallRefused
from swarmcli.events import PeerRefused
from swarmcli.network import Stream

_STALLED = 5.0  # seconds without a byte, after which a member that knows of a commit waits for nobody in particular


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
        step: int | None = None,
    ) -> None:
        """`tensors` must not change until `run` has returned. `weight` is of this member's tensors in the mean; with
        zero it takes part and adds nothing. An auxiliary's tensors only tell shapes and types, and it has no weight.
        `step`: its number, if this is one of several steps of a round: members that are late then find what the steps
        before committed in memory, and no step by itself in files.

        Raises ValueError for a weight that is neither zero nor one that reducers accept, and for tensors that have
        no mean; KeyError if this peer is not in the group.
        """
        if weight != 0 and not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise ValueError(f"weight must be 0, or {MIN_WEIGHT} to {MAX_WEIGHT}, got {weight}")
        self.group = group
        self._service, self._mates = service, Mates(service, group)
        self._options = options if options is not None else AllreduceOptions()
        self._tensors, self._weight, self._step = tensors, weight, step
        layout = Layout.of(tensors, self._options.compression, self._options.tensor_infos)
        self._plan = Plan.make(layout, group.part_shares, self._options.part_size_bytes)
        self._senders = frozenset(range(len(group))) - self._mates.auxiliaries
        self._trouble = Gathered()  # its failures: why averages are missing here
        self._exchanges: list[Exchange] = []  # that of the round, and those of repairs
        self._mending, self._one_repair, self._news = 0, asyncio.Lock(), Bell()  # ballot of the last repair
        self._late: KeptRound | None = None
        self._was_late = False
        self._mine: Contribution | None = None  # not of an auxiliary, like the next
        self._results: Results | None = None
        self.holdings: Holdings
        self._votes: RoundVotes
        self._agreement: Agreement

    async def run(self) -> AllreduceResult:
        """Takes part until the round's outcome is known.

        Raises RoundFailed when the group gave it up: nothing changed anywhere. Raises RoundUndecided when this
        member could not follow the group: its tensors are untouched, others may hold averages.
        """
        if not self._step:
            self._service.release()
        await self._prepare()
        with self._service.hosting(self) as self._votes:
            self._agreement = self._make_agreement()
            decision: Decision | None = None
            try:
                decision = await self._decide()
                return self._conclude(decision)
            finally:
                self._let_go(isinstance(decision, Committed))

    @property
    def parts(self) -> int:
        return len(self._plan.parts)

    # What the service hands over

    async def take_stream(self, member: int, request: OpenExchange, stream: Stream) -> None:
        while request.ballot > self._mending:
            if self._votes.over:
                raise CallRefused("over", "this round is over here")
            await self._news.wait()
        for exchange in self._exchanges:
            if exchange.ballot == request.ballot:
                await exchange.take_stream(member, request, stream)
                return
        raise CallRefused("ballot", f"nothing is reduced here in ballot {request.ballot}")

    def take_vote(self, member: int, vote: VoteMessage) -> None:
        if self._mates.me != 0:
            raise CallRefused("not leading", "votes go to the leader")
        if vote.digest is not None and member in self._mates.auxiliaries:
            raise CallRefused("vote", "an auxiliary accepts what is named to it")
        self._agreement.hear(member, vote)

    def take_absence(self, teller: int, member: int, reason: str) -> None:
        if self._agreement.follows(teller) is not None:
            raise CallRefused("not leading", "only the leader says who is absent")
        self._absent(member, reason)

    async def tell_outcome(self, member: int) -> Decision | None:
        return await self._agreement.word(member)

    async def prepare(self, member: int, ballot: int) -> PrepareAnswer:
        """Promises once nothing more comes by itself; or says whom this member follows instead."""
        agreement, votes = self._agreement, self._votes
        if agreement.follows(member) is None:
            await agreement.gathered()
        leader = agreement.follows(member)
        if leader is not None and votes.decision is None:
            return PrepareAnswer(promised=votes.acceptor.promised, follows=leader)
        answer = votes.prepare(ballot)
        if not answer.granted or votes.over:
            return answer
        self._news.ring()  # a repair of a lower ballot need not go on
        return self.disclose(answer)

    def disclose(self, promise: PrepareAnswer) -> PrepareAnswer:
        """A promise, and what this member could give to a repair."""
        trouble, held = self._trouble, self.holdings
        return msgspec.structs.replace(
            promise,
            digests=held.digests,
            plan=held.plan.fingerprint,
            reason=trouble.reason,
            suspects=trouble.suspects,
        )

    def holds(self, digest: bytes) -> bool:
        return self.holdings.digest == digest

    async def repair(self, order: Repair) -> RepairAnswer:
        """Takes part in a repair; returns when it has come to its end here, or a higher ballot has begun."""
        votes, holdings = self._votes, self.holdings
        async with self._one_repair:
            if votes.over or votes.acceptor.promised != order.ballot:
                return RepairAnswer(None, "another ballot has begun")
            work = Mending(self._mates, order, holdings, self._mine, self._results, self._options)
            if work.exchange is not None:
                self._exchanges.append(work.exchange)
            self._mending = order.ballot
            self._news.ring()
            async with beside(work.run()) as mending, beside(self._outbid(order.ballot)) as outbid:
                await asyncio.wait([mending, outbid], return_when=asyncio.FIRST_COMPLETED)
                got = mending.result() if mending.done() else Gathered()
        digest = None if self._mates.auxiliary else holdings.digest
        return RepairAnswer(digest, got.reason or "parts are missing", got.suspects)

    mend = repair  # as the proposer's own part in it is called

    # The round

    async def _prepare(self) -> None:
        layout = self._plan.layout
        if not self._mates.auxiliary:
            self._mine = await on_executor(layout.nbytes, _contribution, self._tensors, self._weight)
            self._results = Results(layout, self._service.memory.take(layout.nbytes))
        self.holdings = Holdings(self._plan, self._results)
        exchange = Exchange(self._mates, self._plan, self._senders, self._mine, self._results, self._options)
        self._exchanges.append(exchange)
        self._mates.learn_addresses()

    @forgetful
    async def _decide(self) -> Decision | None:
        """The decision; if it is a commit, what is missing of the result is fetched."""
        (exchange,) = self._exchanges
        async with (
            beside(self._agreement.run()) as agreeing,
            beside(exchange.run()) as reducing,
            beside(self._take_part(exchange)) as taking_part,
        ):
            decision = await agreeing
            if isinstance(decision, Committed):
                await self._finish(taking_part, reducing)
                async with self._one_repair:  # one that is under way comes to its end by itself
                    await self._catch_up(decision.digest)
            return decision

    async def _finish(self, *exchanging: asyncio.Task[None]) -> None:
        """After a commit: waits for what is still exchanged, as long as anything arrives.

        Whoever goes on waiting for a member that is silent finds that the others have let go of what they hold.
        """
        arrived, unfinished = -1, set(exchanging)
        while unfinished and arrived != self._bytes_received:
            arrived = self._bytes_received
            _, unfinished = await asyncio.wait(unfinished, timeout=_STALLED)
        for task in unfinished:
            task.cancel()  # or what still arrives could be written over what is copied
        await asyncio.wait(exchanging)
        for task in set(exchanging) - unfinished:
            task.result()

    async def _take_part(self, exchange: Exchange) -> None:
        """Exchanges everything, and tells what came of it."""
        try:
            async with asyncio.timeout(self._options.allreduce_timeout):
                self._take_up(await exchange.gather())
        except TimeoutError:
            late = f"not done within {self._options.allreduce_timeout} s"
            self._trouble = Gathered(complaint=late)
        trouble, digest = self._trouble, None if self._mates.auxiliary else self.holdings.digest
        await self._agreement.report(digest, trouble.reason, trouble.suspects)

    def _take_up(self, got: Gathered) -> None:
        """Parts of nobody are no averages, unless all are."""
        some = [average for average in got.averages if average.senders]
        if some and len(some) < len(got.averages):
            for average in got.averages:
                if not average.senders:
                    got.failures.setdefault(
                        average.part.reducer, f"nobody's tensors arrived for part {average.part.index}"
                    )
            got.averages = some
        self.holdings.put(got.averages)
        self._trouble = Gathered(failures=got.failures)

    async def _catch_up(self, digest: bytes) -> None:
        if self._results is None or self.holdings.digest == digest:
            return
        self._was_late = True
        copier = Copier(self._mates, self._plan.fingerprint, self._results, self._options)
        archive = self._service.archive if self._step is None else None
        if not await copy_committed(self._mates, copier, self.holdings, digest) and archive is not None:
            self._late = await fetch_committed(self._mates, archive, self.holdings, digest)

    async def _outbid(self, ballot: int) -> None:
        while self._votes.acceptor.promised <= ballot and not self._votes.over:
            await self._news.wait()

    # The end

    def _conclude(self, decision: Decision | None) -> AllreduceResult:
        parts = tuple(self.holdings.averages)
        digest = self.holdings.digest
        if self._late is not None:
            parts, digest = tuple(self._late.parts(self._plan)), self._late.record.digest
        if self._mates.auxiliary and isinstance(decision, Committed):
            digest = decision.digest  # it holds no result that could differ
        conclude(digest, decision, [member.peer_id for member in self.group.members])
        weights, partly = contributions(self.group, parts)
        left_out: dict[int, str] = {}
        for exchange in self._exchanges:
            left_out |= exchange.all_left_out
        left_out |= self._trouble.failures
        named = {self._mates.peer(index): reason for index, reason in left_out.items()}
        return AllreduceResult(
            averages=self._averages() if weights else [],
            contributors=tuple(weights),
            weights=weights,
            left_out={peer: reason for peer, reason in (partly | named).items() if peer not in weights},
            digest=digest or b"",
            bytes_sent=sum(stream.bytes_sent for stream in self._streams),
            bytes_received=self._bytes_received,
            parts=parts,
            deputies=deputies_of(self.group, self._plan, parts),
            late=self._was_late,
        )

    @property
    def _streams(self) -> list[Stream]:
        return [stream for exchange in self._exchanges for stream in exchange.streams]

    @property
    def _bytes_received(self) -> int:
        return sum(stream.bytes_received for stream in self._streams)

    def _averages(self) -> list[torch.Tensor]:
        if self._late is not None:
            return self._late.averages
        return [] if self._results is None else self._results.tensors()

    def _let_go(self, committed: bool) -> None:
        """Errors hold on to the frames that they came through, and so to this object: not to its memory too.

        After a commit, whoever is still being served with averages keeps what that takes.
        """
        self._agreement.stop()
        for exchange in self._exchanges:
            exchange.leave()
            for index, reason in exchange.receiver.refused.items():
                self._mates.endpoint.events.emit(PeerRefused(self._mates.peer(index).text, reason, "tensors"))
            if not committed:
                exchange.reducer.abort("the round was given up")
        complete = committed and self.holdings.digest is not None and self._late is None
        if complete and self._results is not None:
            self._service.keep(self.group.group_id, self.holdings)
        elif self._results is not None:
            self.holdings.drop(range(len(self._plan.parts)))
            self._results.release()
        self._news.ring()
        self._exchanges.clear()
        self._mine = self._results = None
        del self._tensors, self.holdings, self._agreement

    def _make_agreement(self) -> Agreement:
        return Agreement(self._mates, self._votes, self, self._options, self._absent)

    def _absent(self, member: int, reason: str) -> None:
        for exchange in self._exchanges[:1]:
            exchange.absent(member, reason)


def _contribution(tensors: Sequence[torch.Tensor], weight: float) -> Contribution:
    """What this member brings; tensors that cannot be averaged are kept out of everyone's average from the start."""
    inputs = Inputs(tensors)
    if weight > 0 and not inputs.all_finite():
        return Contribution(inputs, 0.0, "its tensors hold NaN or infinity")
    if reason := beyond_sums(inputs.tensors, weight):
        return Contribution(inputs, 0.0, f"its tensors hold {reason}")
    return Contribution(inputs, weight)
