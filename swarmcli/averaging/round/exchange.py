"""One exchange of a round: parts go to their reducers, and averages come back.

own parts ─────────────────▶ own reducer ───▶ averages ──▶ everyone
parts of others' shares ───▶ their reducers ─▶ averages ──▶ here        all at the same time, part by part
"""

from __future__ import annotations

import asyncio
import math
import statistics
from itertools import chain

from swarmcli.averaging.bandwidth import MAX_CLAIM, MIN_CLAIM
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.group import Group
from swarmcli.averaging.round.auditing import Audits
from swarmcli.averaging.round.buffers import Average, Holdings, Inputs, Results, root_of
from swarmcli.averaging.round.copying import Copier
from swarmcli.averaging.round.faults import CommonMeans, Faults
from swarmcli.averaging.round.mates import GroupMates
from swarmcli.averaging.round.messages import OpenExchange
from swarmcli.averaging.round.pace import MODEST, Lessons, Pace, Tempo, usual_time
from swarmcli.averaging.round.plan import Plan
from swarmcli.averaging.round.receiver import PartReceiver
from swarmcli.averaging.round.reducer import Reducer
from swarmcli.averaging.round.sender import PartSender
from swarmcli.averaging.round.service import AllreduceService
from swarmcli.averaging.round.signed import SignedLists
from swarmcli.averaging.seats import NOISE, TRIAL, Seats
from swarmcli.averaging.shares import slowest_line
from swarmcli.averaging.weights import WeightBounds
from swarmcli.concurrency import forgetful
from swarmcli.events import PeerRefused
from swarmcli.network import Stream
from swarmcli.network.loop_thread import loop_time

UNTRUE = "its parts lack this member's, which it had in time, or have such as this member has not sent"


class PartExchange:
    """One member's part in one exchange. Made and run once."""

    def __init__(
        self,
        service: AllreduceService,
        group: Group,
        round_id: bytes,
        plan: Plan,
        mine: Inputs | None,
        results: Results | None,
        options: AllreduceOptions,
        seats: Seats,
        quickly: float,
        late: bool,
    ) -> None:
        """`mine` and `results`: None for an auxiliary. `seats`, `quickly`, `late`: see Allreduce."""
        self.group, self.round_id, self.holdings = group, round_id, Holdings(plan, results)
        self.mates = mates = GroupMates(service.endpoint, service.method, group, round_id)
        self._service, self._plan = service, plan
        self._time = options.allreduce_timeout or usual_time(plan.layout.nbytes)
        self._nbytes = nbytes = sum(max(part.payload_bound, part.average_bound) for part in plan.parts)
        trip, senders = mates.slowest_round_trip, sorted(set(range(len(group))) - group.auxiliaries)
        others = [index for index in senders if index != mates.me] if mates.me in plan.by_reducer else []
        self._tempo = tempo = Tempo(self._time, self._planned(nbytes, seats.planned), trip)
        tempo.unwaited = frozenset(index for index in others if mates.peer(index) in seats.unwaited)
        tempo.grace = max(NOISE, TRIAL * seats.epoch) + trip
        tempo.quickly = quickly if others else math.inf
        self.holdings.signed = signed = SignedLists(group, service.prefix, service.peer_trust)
        self.faults = Faults()
        in_time = options.trust == "strangers" and not late and mates.peer(mates.me) not in seats.unwaited
        sides = frozenset(senders), mine, results, options, signed, tempo, self.faults, in_time
        means = CommonMeans(mates, plan, *sides)
        self.audits = Audits(means, service.prefix, service.peer_trust) if options.audit > 0 else None
        self._means = means
        note_inputs = None if self.audits is None else self.audits.note_inputs
        bounds = WeightBounds.of(group, senders, options)
        self._reducer = Reducer(plan, mates.me, senders, mine, results, options.aggregator, bounds, note_inputs)
        if mine is not None:
            self._reducer.begin(mates.me, mine.weight, mine.samples, mine.note)
        # This member's own sending counts as one of the streams: so in a group of two it can tell that only the other
        # is slow. Averages from auxiliaries show that this member's own line receives well.
        signs = 1 + len(group.auxiliaries & plan.by_reducer.keys() - {mates.me} if mine is not None else ())
        parts_pace = Pace(tempo, len(others) + signs)
        self._receiver = PartReceiver(means, self.audits, self._reducer, others, parts_pace)
        self._sender = PartSender(means, self.audits, Pace(tempo, len(plan.by_reducer), averages=True), parts_pace)
        self.copier = None if results is None else Copier(mates, self.holdings, results, signed, options)

    def _planned(self, nbytes: int, waits: float) -> float | None:
        """Seconds that the streams should take, by the last rounds here, and by `waits`, the seconds of the slowest
        member with a seat, or else by the members' bandwidths, if these are bytes per second. None: nothing is
        known."""
        group = self.group
        figures = [member.bandwidth for member in group.members if member.bandwidth > 0]
        usual = [took * max(1.0, nbytes / before) for took, before in self._service.took]
        known = [statistics.median(usual)] if usual else []
        if waits > 0:  # the slowest line by the bandwidths may be of a member for which nobody waits
            known.append(waits)
        elif figures and min(figures) >= MIN_CLAIM and max(figures) <= MAX_CLAIM:
            known.append(slowest_line(group.members, group.part_shares) * nbytes)
        return max(known) + nbytes / MODEST if known else None

    async def reduce(self) -> None:
        """Serves the members until all have their averages."""
        await self._receiver.run()

    async def take_stream(self, member: int, request: OpenExchange, stream: Stream) -> None:
        """Serves a stream that another member has opened. Raises CallRefused."""
        if request.by_reducer:
            await self._sender.welcome(member, stream)
        else:
            await self._receiver.serve(member, stream)

    @forgetful
    async def gather(self) -> bool:
        """Sends the parts and gets the averages. Afterwards `holdings` are complete, or `faults` say what is missing.
        Returns whether it ended in time."""
        began = loop_time()
        try:
            async with asyncio.timeout(self._time) as self._tempo.deadline:
                self._take_up(await self._sender.gather(self._reducer))
                self._tempo.deadline = None
                return True
        except TimeoutError:
            await self.end()
            self.faults.failed.clear()
            self.faults.complaint = f"not done within {loop_time() - began:.0f} s"
            return False

    def _take_up(self, averages: list[Average]) -> None:
        """Takes the averages that count. One without senders does not, unless no average has any."""
        me, failed = self.mates.me, self.faults.failed
        own = [each for each in averages if each.part.reducer == me]
        if own and me not in failed:
            self._means.signed.sign(me, self.mates.endpoint.identity, root_of(own))
        counts = any(average.senders for average in averages)
        for part in [average.part for average in averages if counts and not average.senders]:
            failed.setdefault(part.reducer, f"nobody's tensors arrived for part {part.index}")
        self.holdings.put(each for each in averages if each.senders or not counts)

    def judge(self) -> str:
        """Returns why this member does not vote for the averages, which are all here; "": it does. Reducers that say
        untruly what it has brought count as failed, whoever gave their averages."""
        self.faults.failed |= dict.fromkeys(self.faults.untrue, UNTRUE)
        return UNTRUE if self.faults.untrue else ""

    @forgetful
    async def audit(self) -> None:
        """Computes some of the averages again before this member votes for them. All of them are here."""
        results, told, me = self.holdings.results, self._means.signed.told, self.mates.me
        if self.audits is None or results is None:
            return
        async with asyncio.TaskGroup() as tasks:
            for reducer in self._plan.by_reducer.keys() - {me}:
                averages = [each for each in self.holdings.averages if each.part.reducer == reducer]
                tasks.create_task(self.audits.look_at(reducer, averages, told[reducer], results))

    async def end(self) -> None:
        """Ends the exchange; returns once no stream writes to the memory of the results any more. Members that still
        wait for averages from this one get none."""
        self._sender.leave()
        await self._reducer.close("this exchange is over")

    def leave(self, committed: bool) -> Lessons:
        """The round has ended here. Returns what the next one can learn from it."""
        self._sender.leave()
        endpoint, faults, peer = self.mates.endpoint, self.faults, self.mates.peer
        for index, reason in faults.refused.items():
            endpoint.events.emit(PeerRefused(peer(index).text, reason, "tensors"))
        if not committed:  # otherwise the reducer still serves members that wait
            self._reducer.abort("the round was given up")
        elif self._tempo.took:
            self._service.took.append((max(self._tempo.took), self._nbytes))
        if self.audits is not None:
            self.audits.leave()
        return Lessons(
            {peer(index): reason for index, reason in faults.suspects.items()},
            frozenset(map(peer, faults.lost & faults.suspects.keys())),
            {peer(index): seconds for index, seconds in self._tempo.sending.items()},
            frozenset(map(peer, faults.failed)),
            broke=faults.broke,
            cut=frozenset(map(peer, faults.cut)),
        )

    @property
    def failed(self) -> set[int]:
        """Reducers that gave no averages here, or gave them too slowly."""
        return self.slow & self._plan.by_reducer.keys()

    @property
    def slow(self) -> set[int]:
        """All failed reducers, and members that were too slow."""
        return self.faults.failed.keys() | self._tempo.slow.keys()

    @property
    def left_out(self) -> dict[int, str]:
        """Member index → why its tensors are missing somewhere, by this reducer and the others, or how it failed as a
        reducer."""
        return self._reducer.left_out | self.faults.left_out | self.faults.failed

    @property
    def bytes_sent(self) -> int:
        return sum(stream.bytes_sent for stream in chain(self._sender.streams, self._receiver.streams))

    @property
    def bytes_received(self) -> int:
        return sum(stream.bytes_received for stream in chain(self._sender.streams, self._receiver.streams))
