"""One try at a round: the members exchange missing parts, and agree on the outcome.

    own parts ─────────────────▶ own reducer ───▶ averages ──▶ everyone
    parts of others' shares ───▶ their reducers ─▶ averages ──▶ here        all at the same time, part by part
    everything is here ──▶ vote with its digest ──▶ the leader's decision

Where reducers are lost the group decides to try again (`Again`): the next try has an id, votes and streams of its own,
and copies all averages that members hold after the last try, instead of sending and adding them again.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain

from swarmcli.averaging.bandwidth import MAX_CLAIM, MIN_CLAIM
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.consensus.acceptor import RoundVotes
from swarmcli.averaging.consensus.certificate import DoubleVote
from swarmcli.averaging.consensus.leader import Agreement
from swarmcli.averaging.consensus.messages import Again, Committed, Decision, Report
from swarmcli.averaging.consensus.presence import GroupCalls
from swarmcli.averaging.group import Group
from swarmcli.averaging.round import pace
from swarmcli.averaging.round.auditing import Audits
from swarmcli.averaging.round.buffers import (
    NOTHING,
    Average,
    Holdings,
    Inputs,
    common_digests,
    digest_at,
    unless_missing,
    without,
)
from swarmcli.averaging.round.copying import Copier
from swarmcli.averaging.round.messages import OpenExchange
from swarmcli.averaging.round.pace import PACE, Pace, Tempo
from swarmcli.averaging.round.plan import Plan
from swarmcli.averaging.round.receiver import PartReceiver
from swarmcli.averaging.round.reducer import Reducer
from swarmcli.averaging.round.sender import Gathered, PartSender
from swarmcli.averaging.round.service import AllreduceService
from swarmcli.averaging.round.signed import SignedLists
from swarmcli.averaging.seats import NOISE, TRIAL
from swarmcli.averaging.shares import reducers_among, slowest_link
from swarmcli.averaging.weights import WeightBounds
from swarmcli.events import PeerRefused
from swarmcli.network import PeerID, Stream
from swarmcli.network.loop_thread import loop_time
from swarmcli.tasks import beside, forgetful


@dataclass(frozen=True, slots=True)
class Avoided:
    """Members that further tries of a round avoid, by index. The sets grow.

    unreachable     this member could not reach them
    failed_holders  see Copier
    slow            their parts came too slowly
    """

    unreachable: set[int] = field(default_factory=set)
    failed_holders: set[int] = field(default_factory=set)
    slow: set[int] = field(default_factory=set)


class Attempt:
    """One try at one member. Made and run once."""

    def __init__(
        self,
        service: AllreduceService,
        group: Group,
        holdings: Holdings,
        mine: Inputs | None,
        options: AllreduceOptions,
        again: Again | None,
        avoided: Avoided,
        last: bool,
    ) -> None:
        """`holdings`: the averages that are here, by the plan of the round. `mine`: None for an auxiliary. `again`: the
        decision of the last try; None: this is the first. `avoided`: by the tries before; grows. `last`: no other try
        may follow."""
        self.group, self.holdings, self.trust = group, holdings, options.trust
        self._service, self._options, self._again, self._last = service, options, again, last
        self.mates = mates = GroupCalls(service.endpoint, service.method, group)
        everyone = frozenset(range(len(group)))
        members = everyone if again is None else everyone & set(again.members)
        self._plan = plan = holdings.plan if again is None else _missing(holdings, again)
        self._lost = everyone - members
        self._avoided = avoided
        if options.trust == "members":  # members that reported were only slow, or this one passed over them
            avoided.unreachable.difference_update(members)
        avoided.unreachable.update(self._lost - {mates.me})
        senders = sorted(members - mates.group.auxiliaries)
        mine, results = (mine if mates.me in senders else None), holdings.results
        self.audits: Audits | None = None
        if options.audit > 0:
            self.audits = Audits(mates, plan, service.prefix, senders, mine, service.peer_trust, options)
        note_inputs = None if self.audits is None else self.audits.note_inputs
        bounds = WeightBounds.of(group, senders, options)
        self._reducer = Reducer(plan, mates.me, senders, mine, results, options.aggregator, bounds, note_inputs)
        if mine is not None:
            self._reducer.begin(mates.me, mine.weight, mine.samples)
        others = [index for index in senders if index != mates.me] if self._reducer.parts else []
        self._signed = holdings.signed = SignedLists(group, service.prefix, service.peer_trust)
        self._time = options.allreduce_timeout or pace.usual_time(plan.layout.nbytes)
        self._nbytes = nbytes = sum(max(part.payload_bound, part.average_bound) for part in plan.parts)
        planned, trip = self._planned(nbytes), mates.slowest_round_trip
        self._tempo = tempo = Tempo(self._time, planned, trip, nbytes, mates.endpoint.rates)
        self.sending = tempo.sending  # member index → seconds that it took to send; see Lessons
        tempo.indirect = frozenset(filter(mates.over_relay, others))
        tempo.unwaited = frozenset(index for index in others if mates.peer(index) in service.seats.unwaited)
        tempo.grace = max(NOISE, TRIAL * service.seats.epoch) + trip
        tempo.quickly = service.quickly if others else math.inf
        # This member's own sending counts as one of the streams: so a group of two can tell that the other one alone is
        # slow. Averages from auxiliaries show that this member's own way in is not slow.
        signs = 1 + len(mates.group.auxiliaries & plan.by_reducer.keys() - {mates.me} if mine is not None else ())
        parts_pace = Pace(tempo, len(others) + signs)
        averages_pace = Pace(tempo, len(plan.by_reducer), averages=True)
        self._receiver = PartReceiver(
            mates, plan, self._reducer, others, self._signed, self.audits, options, parts_pace, last=last
        )
        self._sender = PartSender(
            mates, plan, senders, mine, results, self._signed, self.audits, options, averages_pace, parts_pace
        )
        for member in avoided.slow & set(others):
            self._reducer.leave_out(member, "it was too slow in the try before")
        self.strangers: dict[PeerID, str] = {}  # listed, and not met → why this member doubts them
        self.needed = 0.0  # seconds that the exchange would have taken, if it did not end in time
        coming = [part.average_bound for part in plan.parts if part.reducer != mates.me]
        self._coming = sum(coming) + len(others) * sum(part.payload_bound for part in self._reducer.parts)
        self.copier = None if results is None else Copier(mates, holdings, results, options, avoided.failed_holders)
        self.trouble = Gathered()  # its failures: why averages are missing here
        self._one_copies = asyncio.Lock()
        self.votes: RoundVotes
        self.agreement: Agreement

    def _planned(self, nbytes: int) -> float | None:
        """Seconds that the streams should take: by the members' bandwidths, where these are bytes per second, and by
        the last rounds here. None: nothing is known."""
        group, waits = self.mates.group, self._service.seats.planned
        figures = [member.bandwidth for member in group.members if member.bandwidth > 0]
        usual = [took * max(1.0, nbytes / before) for took, before in self._service.took]
        known = [statistics.median(usual)] if usual else []
        known += [waits] if waits > 0 else []
        if figures and min(figures) >= MIN_CLAIM and max(figures) <= MAX_CLAIM:
            claimed = slowest_link(group.members, group.part_shares) * nbytes
            if waits > 0:  # the others are quicker: a line that is slow by claims alone is on trial
                epoch = loop_time() - self._service.committed
                claimed = min(claimed, max(waits, TRIAL * epoch))
            known.append(claimed)
        return max(known) + nbytes / PACE.modest if known else None

    @property
    def patience(self) -> float:
        return min(self._tempo.patience, self._options.for_reducer)

    async def run(self) -> Decision | None:
        """Takes part until the outcome of this try is known, or (None) known to stay unknown here."""
        with self._service.hosting(self) as self.votes:
            unreachable = self._avoided.unreachable
            self.agreement = Agreement(self.mates, self.votes, self, self._options, self._lost, unreachable)
            decision: Decision | None = None
            try:
                decision = await self._decide()
                return decision
            finally:
                self.agreement.stop()
                self._sender.leave()
                for index, reason in self._receiver.refused.items():
                    self.mates.endpoint.events.emit(PeerRefused(self.mates.peer(index).text, reason, "tensors"))
                if not isinstance(decision, Committed):  # otherwise the reducer still serves members that wait
                    self.strangers = self._strangers()
                    self._reducer.abort("the round was given up")
                elif self._tempo.took:
                    self._service.committed = loop_time()
                    self._service.took.append((max(self._tempo.took), self._nbytes))
                if self.audits is not None:
                    self.audits.leave()
                del self.agreement  # which knows this try as its parts

    @property
    def evidence(self) -> tuple[DoubleVote, ...]:
        """The proofs against members that voted twice, if they are so many that this try is void."""
        return self.votes.evidence if self.votes.void else ()

    @property
    def left_out(self) -> dict[int, str]:
        """Member index → why its tensors are missing somewhere, by this reducer and the others, or how it failed as a
        reducer."""
        return self._receiver.left_out | self._sender.left_out | self.trouble.failures

    @property
    def doubted(self) -> dict[int, str]:
        """Member index → how it kept this member waiting in vain, by no other member's word."""
        return self._receiver.doubted | self._sender.doubted

    @property
    def lost(self) -> set[int]:
        """Doubted members whose connection broke or could not be made: before they began here, or in an audit."""
        late = self._receiver.late.keys() - self._sender.doubted.keys()
        lost = {member for member in late if self._receiver.late[member] or member in self._sender.lost}
        return lost if self.audits is None else lost | self.audits.broken

    @property
    def bytes_sent(self) -> int:
        return sum(stream.bytes_sent for stream in chain(self._sender.streams, self._receiver.streams))

    @property
    def bytes_received(self) -> int:
        return sum(stream.bytes_received for stream in chain(self._sender.streams, self._receiver.streams))

    async def take_stream(self, member: int, request: OpenExchange, stream: Stream) -> None:
        """Serves a stream that another member has opened. Raises CallRefused."""
        if request.by_reducer:
            await self._sender.welcome(member, stream)
        else:
            await self._receiver.serve(member, stream)

    def drop_false(self) -> None:
        """Drops the averages of reducers that lied: this member does not hold the result any more."""
        for liar, reason in {} if self.audits is None else self.audits.liars.items():
            self.holdings.drop(part.index for part in self._plan.by_reducer.get(liar, ()))
            self.trouble.failures[liar] = reason
            self._avoided.failed_holders.add(liar)

    def _strangers(self) -> dict[PeerID, str]:
        """Listed voters whose votes did not count here. If more of them than can be hostile are not connected, also the
        leader that listed them."""
        votes, members = self.votes, self.group.members
        unmet = {index for index in votes.quorum.voters if not votes.met(index)}
        found = {members[index].peer_id: "nobody answers at the address by which it votes" for index in unmet}
        absent = {index for index in unmet if not self.mates.is_connected(index)}
        if votes.quorum.weight(absent) > votes.quorum.hostile and self.mates.me != 0:
            found[self.group.leader] = "it listed members whom nobody can reach"
        return found

    # The agreement asks this about the parts

    @property
    def busy(self) -> bool:
        return self._one_copies.locked()

    def report(self) -> Report:
        held, trouble = self.holdings, self.trouble
        digest = None if self.mates.auxiliary else held.digest
        failed = tuple(sorted(trouble.failures.keys() | self._tempo.slow.keys()))
        return Report(digest, held.plan.fingerprint, held.digests, trouble.reason, failed, self._signed.told)

    def holds(self, digest: bytes) -> bool:
        return self.holdings.digest == digest

    async def obtain(self, digest: bytes) -> None:
        if self.copier is None:
            return
        # Until then the streams write to the same memory: a copy would be overwritten under the digest that it was
        # checked against, and nobody would notice.
        await self.agreement.gathered()
        async with self._one_copies:
            await self.copier.obtain(digest)

    def absent(self, member: int, reason: str) -> None:
        self._receiver.absent(member, reason)
        self._sender.doubt(member)

    def again(self, reports: Mapping[int, Report]) -> Again | None:
        mates, plan = self.mates, self.holdings.plan
        for report in reports.values():
            self._signed.compare(report.signed)
        banned = self._signed.banned()
        reports = {
            member: report
            for member, report in reports.items()
            if report.plan == plan.fingerprint and member not in banned
        }
        senders = sorted(reports.keys() - mates.group.auxiliaries)
        held = common_digests([report.digests for report in reports.values()], len(plan.parts))
        if self._again is not None:  # an average that a member could not copy in this try counts as held by none
            held = unless_missing(held, self._again.held, [reports[member].digests for member in senders])
        held = without(held, [part.index for member in banned for part in self._plan.by_reducer.get(member, ())])
        # A member that reduced nothing in this try has failed nobody, and proved nothing: it may have failed before.
        failed = {member: set(report.failed) for member, report in reports.items()}
        able = without_quarrels(failed, self.votes.quorum.weights)
        parties = set(self._plan.by_reducer if self._again is None else self._again.reducers)
        choices = (able & parties, able, least_named(failed))
        found = (reducers_among(mates.group.members, sorted(choice), senders) for choice in choices)
        reducers = next(filter(None, found), ())
        if self._last or not senders or not reducers or not self.votes.quorum.decides(reports):
            return None
        return Again(tuple(sorted(reports)), reducers, held)

    # The try

    @forgetful
    async def _decide(self) -> Decision | None:
        async with (
            beside(self.agreement.run()) as agreeing,
            beside(self._receiver.run()) as reducing,
            beside(self._take_part()) as taking_part,
        ):
            decision = await agreeing
            if isinstance(decision, Committed):
                await self._finish(taking_part, reducing)
        if not isinstance(decision, Committed) or not self.holds(decision.digest):
            # The next steps write to the memory of the results: another try, or copies of missing averages.
            await self._end_exchange()
        return decision

    async def _take_part(self) -> None:
        """Exchanges everything, and votes by the outcome."""
        began = loop_time()
        try:
            async with asyncio.timeout(self._time) as self._tempo.deadline:
                self._take_up(await self._gather())
                self._tempo.deadline = None
        except TimeoutError:
            await self._end_exchange()
            fraction, seconds = min(1.0, self.bytes_received / max(1, self._coming)), loop_time() - began
            self.needed = pace.needed(seconds, fraction)
            self.trouble = Gathered(complaint=f"not done within {seconds:.0f} s: {fraction:.0%} had come")
        self._avoided.slow.update(self._tempo.slow)
        digest = None if self.mates.auxiliary else self.holdings.digest
        await self.agreement.vote(digest, self.trouble.reason, self.doubted.keys() - self._receiver.late.keys())

    async def _gather(self) -> Gathered:
        """Gathers missing averages: from reducers, or copies from members that hold them."""
        if self._again is None or self.copier is None or self.mates.me in self._lost:
            return await self._sender.gather(self._reducer)
        count, me = len(self.mates), self.mates.me
        sources = sorted(set(self._again.members) - {me}, key=lambda member: (member - me) % count)
        async with beside(self.copier.copy(self._again.held, sources)) as copying:
            got = await self._sender.gather(self._reducer)
            got.failures |= await copying
        if lacking := self.holdings.lacking(self._again.held):
            got.complaint = f"nobody gave a copy of {len(lacking)} averages"
        return got

    def _take_up(self, got: Gathered) -> None:
        """Takes the averages that count. Parts without senders do not, unless all parts have none; nor do those of a
        reducer that kept half of the members out."""
        averages = got.averages if any(average.senders for average in got.averages) else []
        for part in [average.part for average in averages if not average.senders]:
            got.failures.setdefault(part.reducer, f"nobody's tensors arrived for part {part.index}")
        alone = keeping_out([*self.holdings.averages, *averages])
        for reducer in alone:
            got.failures.setdefault(reducer, "half of the members that others have averaged are not in its parts")
        good = (each for each in got.averages if each.part.reducer not in alone and (each.senders or not averages))
        self.holdings.put(good)
        self.trouble = Gathered(failures=got.failures, complaint=got.complaint)

    async def _finish(self, *exchanging: asyncio.Task[None]) -> None:
        """After a commit: waits for the rest of the exchange, as long as anything arrives and the round may take.

        A member that waited longer for a silent one would find that the others have let go of the averages.
        """
        arrived, unfinished, ends_at = -1, set(exchanging), loop_time() + self._time
        while unfinished and arrived != self.bytes_received and loop_time() < ends_at:
            arrived = self.bytes_received
            _, unfinished = await asyncio.wait(unfinished, timeout=PACE.stalled)
        if unfinished and self.audits is not None:
            # All averages may be here, but for the inputs of one that an audit still waits for: over a slow link longer
            # than it takes to fetch the whole result again.
            self.audits.settle()
            _, unfinished = await asyncio.wait(unfinished, timeout=PACE.stalled)
        for task in unfinished:
            task.cancel()  # or late averages could overwrite the copies
        await asyncio.wait(exchanging)  # cancelled arithmetic goes on until it is done
        for task in set(exchanging) - unfinished:
            task.result()

    async def _end_exchange(self) -> None:
        """Returns once no stream writes to the memory of the results any more. Members that still wait for averages of
        this one get none."""
        self._sender.leave()
        await self._reducer.close("this exchange is over")


def _missing(holdings: Holdings, again: Again) -> Plan:
    """The plan of a further try: the parts that no member holds, whose memory it writes."""
    missing = [part.index for part in holdings.plan.parts if digest_at(again.held, part.index) == NOTHING]
    holdings.drop(missing)
    return holdings.plan.only(missing, again.reducers)


def without_quarrels(failed: Mapping[int, Set[int]], weights: Mapping[int, Fraction | int]) -> set[int]:
    """The members that may reduce; `failed`: member → the reducers that failed it, by its own word. Both of such a pair
    are passed over, beginning with those whose pairs weigh most, by the votes of the others in them: a few liars that
    name all others weigh most themselves. If none would be left, the members that fewest name."""
    able, pairs = set(failed), {frozenset((one, other)) for one, others in failed.items() for other in others - {one}}
    while pairs := {pair for pair in pairs if pair <= able}:
        counts = dict.fromkeys(frozenset().union(*pairs), Fraction(0))
        for one, other in pairs:
            counts[one] += weights.get(other, 0)
            counts[other] += weights.get(one, 0)
        most = {member for member, count in counts.items() if count == max(counts.values())}
        if most == able:
            return least_named(failed)
        able -= most
    return able


def least_named(failed: Mapping[int, Set[int]]) -> set[int]:
    named = Counter(member for others in failed.values() for member in others)
    return {member for member in failed if named[member] == min(named[each] for each in failed)}


def keeping_out(averages: Sequence[Average]) -> set[int]:
    """Reducers whose parts lack half of the members, and two at least, that are in the parts of others. One slow sender
    may be late for one reducer alone."""
    counted: dict[int, set[int]] = {}
    for average in averages:
        counted.setdefault(average.part.reducer, set(average.senders)).intersection_update(average.senders)
    everyone = set[int]().union(*counted.values())
    return {reducer for reducer, senders in counted.items() if 2 * len(senders) <= len(everyone) > len(senders) + 1}
