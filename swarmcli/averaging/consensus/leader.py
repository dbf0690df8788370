"""How one member comes to know the outcome of its round: it votes, follows a leader, and leads when it has to.

Every follower asks the leader for the outcome when its round begins, and the answer is the decision itself. So a
decision costs one message to each, and either end notices at once when the other is gone. A member that loses its
leader, or finds it too slow, follows the next in rank that is alive, or leads itself if there is none before it: it
proposes in ballots above zero. A member promises nothing to a proposer while it follows one of a lower rank, so
proposers seldom compete.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from contextlib import suppress

import msgspec

from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.consensus import messages
from swarmcli.averaging.consensus.acceptor import RoundVotes
from swarmcli.averaging.consensus.comparing import gather_confirms
from swarmcli.averaging.consensus.presence import Attendance, GroupCalls
from swarmcli.averaging.consensus.proposer import BallotZero, Parts, Proposer
from swarmcli.backoff import Backoff, growing
from swarmcli.errors import CallRefused, NetworkError
from swarmcli.network.loop_thread import loop_time
from swarmcli.tasks import beside


class Agreement:
    """One member's part in agreeing on the outcome of one round."""

    def __init__(
        self,
        mates: GroupCalls,
        votes: RoundVotes,
        parts: Parts,
        options: AllreduceOptions,
        lost: frozenset[int],
        unreachable: set[int],
    ) -> None:
        """`lost`: members that are not expected to take part. `unreachable`: members that this one does not follow,
        since they are lost or out of its reach; grows."""
        self._mates, self._votes, self._parts, self._options = mates, votes, parts, options
        self._passed = set(lost)  # leaders that did nothing, and members that were too slow here or in the try before
        self._proposer = Proposer(mates, votes, parts, self._passed)
        self._attendance = Attendance(mates, options.to_begin)
        self._absent: asyncio.Queue[messages.AbsenceNotice] = asyncio.Queue()  # to tell the others
        self._cut_off: asyncio.Queue[int] = asyncio.Queue()  # members whose connection over a relay has ended
        self._lost, self._unreachable = lost, unreachable
        self._zero = BallotZero(mates, votes) if mates.me == 0 else None
        self._following = self._candidates()[0]
        self._gathered, self._settled, self._met = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._thin: messages.Decided | None = None  # a decision that others told, of whose votes too few count so far
        self._told = asyncio.Event()  # set with it
        self._passed_over = asyncio.Event()  # the leader is too slow, or does nothing; or: a quorum waits here
        self._askers: set[int] = set()  # members that wait here for the outcome
        turn = mates.options.turn
        self._grants = Backoff[int](turn, 1000 * turn)  # proposers get no promise while they rest
        # By the clock of the loop:
        self._last_sign = -math.inf  # when the leader last did something
        self._first_lost = math.inf  # when this member lost or passed over its first leader
        self._troubled = math.inf  # when its own exchange ended without a result
        self._give_up = ""  # why the round is to be given up
        self._hurry = asyncio.Event()  # set with it

    # This member's part

    async def run(self) -> messages.Decision | None:
        """Takes part until the outcome is known, or (None) known to stay unknown here."""
        try:
            async with asyncio.TaskGroup() as tasks:
                works = (self._pursue(), self._watch_time(), self._watch_leader(), self._meet())
                helpers = [tasks.create_task(work) for work in works]
                await self._settled.wait()
                for helper in helpers:
                    helper.cancel()
            return self._votes.decision
        finally:
            # Cancelled helpers hold this object in their errors: they would keep the parts too, and with them the
            # memory of the round, until the garbage collector comes by.
            self._settled.set()
            del self._proposer, self._parts

    async def _meet(self) -> None:
        """Dials the members that are easier to dial than this one: they cannot dial it if it becomes the only holder of
        the result, or a quorum needs it. Then it dials the voters that the exchange has not met, since their votes
        count only once they are met."""
        members, mine = self._mates.group.members, self._mates.group.members[self._mates.me]
        async with asyncio.TaskGroup() as tasks:
            for index in self._mates.others:
                if members[index].dialable > mine.dialable and not self._mates.is_connected(index):
                    tasks.create_task(self._mates.presence(index))
            while True:
                await _first(self._gathered, self._settled, self._told)
                if meeting := [tasks.create_task(self._meet_one(index)) for index in sorted(self._unmet())]:
                    await asyncio.wait(meeting, timeout=self._mates.options.to_meet)
                for task in meeting:
                    task.cancel()
                self._met.set()
                if self._thin is not None and self.learn(self._thin):
                    return
                self._told.clear()
                await _first(self._told, within=self._mates.options.search_deserted if self._is_padded() else None)
                if not self._told.is_set() and self._is_padded():  # members on their way have come by now
                    self.stop()
                    return

    async def _meet_one(self, index: int) -> None:
        member = self._mates.group.members[index]
        if member.dialable and not self._mates.is_connected(index):
            await self._mates.presence(index)
        if self._votes.quorum.by_networks and not self._votes.met(index):
            timeout = self._mates.options.to_meet
            with suppress(NetworkError):  # it is connected from elsewhere, or not at all
                await self._mates.endpoint.probe(member.addresses[0], member.peer_id, timeout=timeout)
                self._votes.met.found(index)

    def _unmet(self) -> set[int]:
        """Voters whose votes do not count, since they may be no more than keys."""
        return {index for index in self._votes.quorum.voters if not self._votes.met(index)}

    def _is_padded(self) -> bool:
        """Whether so many listed voters could be dialed and are not met here that no decision can count, though this
        member is not cut off. A member that cannot be dialed may still compute, and comes when it begins."""
        quorum, members = self._votes.quorum, self._mates.group.members
        decides = quorum.decides(
            {each for each in quorum.voters if self._votes.met(each) or not members[each].dialable}
        )
        return quorum.guarded and not decides and any(map(self._mates.is_connected, self._mates.others))

    async def meeting(self) -> None:
        """Waits until this member has met all voters, so that their votes count, as far as that succeeds."""
        if self._unmet():
            await _first(self._met, self._settled)

    async def vote(self, digest: bytes | None, reason: str = "", slow: Collection[int] = ()) -> None:
        """This member's own exchange has ended: with a result, or (None) with the reason for none. `slow`: members that
        kept it waiting; it passes over a leader among them.

        An auxiliary has neither; it waits until the leader names a result. Never fails: a leader that cannot hear the
        vote notices that by itself.
        """
        signature = None if digest is None else self._votes.vote_zero(digest)
        vote = messages.VoteMessage(self._mates.group.group_id, digest, reason, signature)
        self._gathered.set()
        self._unreachable.update(slow)
        self._passed.update(slow)
        self._look_whether_passed_over()
        if reason:
            self._troubled = loop_time()
        if digest is not None and signature is None:
            return  # a ballot above zero is under way, which will ask
        if digest is None and not reason:
            return
        if self._zero is not None:
            self.hear(0, vote)
        elif self._following == 0:
            async with beside(self._send_vote(vote)) as voting, beside(self._settled.wait()) as settled:
                await asyncio.wait([voting, settled], return_when=asyncio.FIRST_COMPLETED)

    def stop(self) -> None:
        """This member takes no further part."""
        self._settled.set()

    # Messages of others

    def hear(self, voter: int, vote: messages.VoteMessage) -> None:
        """A vote has arrived. Raises CallRefused unless this member leads, and for a result from an auxiliary."""
        if self._zero is None:
            raise CallRefused("not leading", "votes go to the leader")
        if vote.digest is not None and voter in self._mates.group.auxiliaries:
            raise CallRefused("vote", "an auxiliary accepts the result that the leader names")
        if self._settled.is_set():
            return
        self._zero.hear(voter, vote)
        if vote.digest is None and voter != 0:
            self._announce(voter, vote.reason)
        self._check_zero()

    async def tell_outcome(self, asker: int) -> messages.Decided | None:
        """Answers another member: waits until the outcome is known, or (None) known to stay unknown here."""
        self._attendance.begun[asker].set()
        self._attendance.strangers.discard(asker)
        self._askers.add(asker)
        self._look_whether_passed_over()
        try:
            await self._settled.wait()
        except asyncio.CancelledError:
            if self._mates.over_relay(asker):
                self._cut_off.put_nowait(asker)
            else:
                self._lose(asker, "its connection to the leader ended")
            raise
        finally:
            self._askers.discard(asker)
        return self._votes.decided

    def _look_whether_passed_over(self) -> None:
        """This member passes over a leader that is too slow here, or that a quorum of others has passed over."""
        if self._following in self._passed or self._is_waited_for(alone=True):
            self._passed_over.set()

    def _is_waited_for(self, *, alone: bool = False) -> bool:
        """Whether a quorum, with this member or of others `alone`, would go on with this member in place of its leader:
        members that wait for the outcome here do not wait for the leader. Fewer may only have lost their own connection
        to it."""
        ranks, quorum = self._mates.ranks, self._votes.quorum
        askers = (self._askers & quorum.voters) - self._lost
        behind = {asker for asker in askers if ranks[asker] > ranks[self._following]}
        return quorum.decides(behind if alone else behind | {self._mates.me})

    def hear_absence(self, teller: int, notice: messages.AbsenceNotice) -> None:
        """Raises CallRefused unless the teller leads, as seen from here."""
        if self.follows(teller) is not None:
            raise CallRefused("not leading", "only the leader says who is absent")
        if not self._settled.is_set():
            self._parts.absent(notice.member, notice.reason)

    async def prepare(self, proposer: int, ballot: int) -> messages.PrepareAnswer:
        """Promises once this member's own exchange has ended; or names the leader that this member follows instead."""
        self.note_sign(proposer)
        if self.follows(proposer) is None:
            await self.gathered()
        leader, votes = self.follows(proposer), self._votes
        if leader is not None and votes.decided is None:
            return messages.PrepareAnswer(promised=votes.acceptor.promised, follows=leader)
        if votes.decided is None and not self._grants_to(proposer):
            return messages.PrepareAnswer(promised=votes.acceptor.promised)
        answer = votes.prepare(ballot)
        promises = answer.promise is not None or answer.signed is not None or not votes.votes
        if not promises or self._settled.is_set():
            return answer
        return msgspec.structs.replace(answer, report=self._parts.report())

    def follows(self, asker: int) -> int | None:
        """The leader that this member follows, if it ranks before the asker: then the asker gets no promise."""
        ranks = self._mates.ranks
        return self._following if ranks[self._following] < ranks[asker] and not self._settled.is_set() else None

    def _grants_to(self, proposer: int) -> bool:
        """Whether a proposer may have a promise now. A proposer that had its turn gets promises ever more seldom, or it
        could outbid all others for ever; but it gets some, since it may only have been slow."""
        if proposer not in self._passed:
            return True
        now = loop_time()
        granted = now >= self._grants.until(proposer) > -math.inf  # not yet when it first asks
        self._grants.add(proposer, now)
        return granted

    async def gathered(self) -> None:
        """Waits until this member's own exchange has ended, or the outcome is known."""
        await _first(self._gathered, self._settled)

    def learn(self, decided: messages.Decided) -> bool:
        """Believes a decision that its votes prove, and is done then. Returns whether the outcome is known."""
        if self._votes.learn(decided):
            self._settled.set()
        elif decided != self._thin and self._votes.electorate.is_decided(decided, thin=True):
            self._thin = decided  # its votes may count once their authors are met
            self._told.set()
        return self._settled.is_set()

    @property
    def idle(self) -> bool:
        """Whether this member only waits for the outcome, or knows it already."""
        return self._settled.is_set() or (self._gathered.is_set() and not self._parts.busy)

    def note_sign(self, member: int) -> None:
        """A member does a leader's work."""
        if member == self._following:
            self._last_sign = loop_time()

    # Following

    async def _send_vote(self, vote: messages.VoteMessage) -> None:
        for _ in range(1 + self._mates.options.relays):
            try:
                await self._mates.ask(0, "vote", vote, messages.Noted, self._options.for_reducer)
            except NetworkError as error:
                # The question that waits at the leader ends the same way, and decides what follows; unless only the
                # relay is lost.
                if isinstance(error, CallRefused) or not await self._is_behind_a_lost_relay(0):
                    return
            else:
                return

    async def _pursue(self) -> None:
        """Follows the first in rank, then each next one that is alive; when none is left before this member, leads."""
        relays = self._mates.options.relays
        while not self._settled.is_set():
            if self._following == self._mates.me:
                await self._lead()
                return
            decided = await self._ask_unless_passed_over(self._following)
            if decided is not None and not self.learn(decided):
                await self.meeting()
            if decided is not None and self.learn(decided):
                return
            if relays and not self._passed_over.is_set() and await self._is_behind_a_lost_relay(self._following):
                relays -= 1
                continue
            relays = self._mates.options.relays
            self._unreachable.add(self._following)
            self._first_lost = min(self._first_lost, loop_time())
            if self._passed_over.is_set():
                self._passed.add(self._following)
            candidates = self._candidates()
            self._following = candidates[0]
            self._following = await self._first_alive(candidates)
            self._passed_over.clear()
            self._look_whether_passed_over()

    async def _ask_unless_passed_over(self, leader: int) -> messages.Decided | None:
        async with beside(self._ask(leader)) as asking, beside(self._passed_over.wait()) as passed:
            await asyncio.wait([asking, passed], return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else None

    async def _ask(self, member: int) -> messages.Decided | None:
        """Asks a member for the outcome. None: it does not know and never will, or cannot be reached."""
        question = messages.OutcomeQuestion(self._mates.group.group_id)
        try:
            answer = await self._mates.ask(member, "outcome", question, messages.OutcomeAnswer)
        except NetworkError:
            return None
        self._votes.note_all(answer.twice)
        return answer.decided

    async def _watch_leader(self) -> None:
        """Passes over a leader that does nothing although enough voters wait for it.

        The leader waits for members that still exchange parts, and this member does not count them: nobody can tell how
        long that may take.
        """
        await self._gathered.wait()
        options = self._mates.options
        pauses, watched, since = iter(options.looks), -1, 0.0
        while True:
            await asyncio.sleep(next(pauses, options.looks[-1]))
            if self._following == self._mates.me or not self.idle:
                watched = -1
            elif self._is_waited_for():
                self._passed_over.set()
            elif not await self._enough_wait():
                watched = -1
            elif watched != self._following:
                watched, since = self._following, loop_time()
            else:
                now, trips = loop_time(), options.turn_trips * self._mates.slowest_round_trip
                silent = now - max(since, self._last_sign + options.ballot) > options.turn + trips
                if silent or now - since > options.longest_turn + trips:
                    watched = -1
                    self._passed_over.set()

    async def _enough_wait(self) -> bool:
        """Whether a quorum of voters, with this member, only waits for the leader. Where no quorum is in reach, so that
        no leader could decide anything: whether all that are in reach do."""
        me, quorum = self._mates.me, self._votes.quorum
        others = sorted(quorum.voters - {me, self._following})
        answers = dict(zip(others, await asyncio.gather(*map(self._look_at, others)), strict=True))
        idle = {member for member, answer in answers.items() if answer is not None and answer.idle}
        there = {member for member, answer in answers.items() if answer is not None}
        return quorum.decides(idle | {me}) or (there == idle and not quorum.decides(there | {me, self._following}))

    def _candidates(self) -> list[int]:
        """The members that may lead, by rank, up to this one."""
        ranks, me = self._mates.ranks, self._mates.me
        return [member for member in ranks if ranks[member] < ranks[me] and member not in self._unreachable] + [me]

    async def _first_alive(self, candidates: list[int]) -> int:
        """The first candidate that takes part in the round, this member at the latest; those before it count as
        unreachable."""
        async with asyncio.TaskGroup() as tasks:
            looks = {member: tasks.create_task(self._takes_part(member)) for member in candidates[:-1]}
            for member, look in looks.items():
                if await look:
                    for other in looks.values():
                        other.cancel()
                    return member
                self._unreachable.add(member)
        return self._mates.me

    async def _is_behind_a_lost_relay(self, member: int) -> bool:
        """Whether a member that has not answered takes part, and comes over another relay."""
        return self._mates.over_relay(member) and await self._takes_part(member)

    async def _takes_part(self, member: int) -> bool:
        answer = await self._look_at(member)
        return answer is not None and answer.standing == "running"

    async def _look_at(self, member: int) -> messages.PresenceAnswer | None:
        answer = await self._mates.presence(member)
        if answer is not None and answer.decided is not None:
            self.learn(answer.decided)
        return answer

    # Leading

    async def _lead(self) -> None:
        for member in self._unreachable:
            self._attendance.begun[member].set()
            self._lose(member, "it was lost")
        async with asyncio.TaskGroup() as tasks:
            helpers = [tasks.create_task(self._tell_of_absence()), tasks.create_task(self._attendance.run(self._lose))]
            helpers.append(tasks.create_task(self._look_for_the_cut_off()))
            if self._zero is not None:
                helpers.append(tasks.create_task(self._hold_ballot_zero(self._zero)))
                if self._mates.me in self._lost:
                    self._zero.failed.set()  # the others follow another leader, as the first ballot shows
                await _first(self._zero.failed, self._hurry, self._settled)
            else:
                helpers += [tasks.create_task(self._listen(member)) for member in self._mates.others]
            # A member's report must not change any more: averages that still arrive would lie in the same memory as
            # those that another try reduces. But the others may not wait for a leader's own exchange.
            patience = None if self._zero is None else self._parts.patience
            await _first(self._gathered, self._hurry, self._settled, within=patience)
            if not self._settled.is_set():
                await self._propose_until_settled()
            for helper in helpers:
                helper.cancel()

    async def _hold_ballot_zero(self, zero: BallotZero) -> None:
        """Asks the auxiliaries to vote. In a guarded group, asks all voters to confirm a result that a quorum, and not
        all, have voted for."""
        if self._votes.guarded is None:
            # By then members that lack averages of a slow reducer have said so; that may be the only holder of all.
            await zero.ask_auxiliaries(self._check_zero, 2 * self._parts.patience)
            return
        prepared = await zero.prepared()
        decided = None if prepared is None else await gather_confirms(self._mates, self._votes, prepared)
        if decided is not None:
            self.learn(decided)
        zero.failed.set()

    async def _look_for_the_cut_off(self) -> None:
        async def look_for(member: int) -> None:
            if not await self._takes_part(member):
                self._lose(member, "its connection to the leader ended")

        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(look_for(await self._cut_off.get()))

    async def _listen(self, member: int) -> None:
        """Another member may know the outcome, or learn it from a member that this one cannot reach."""
        decided = await self._ask(member)
        if decided is not None:
            self.learn(decided)

    async def _propose_until_settled(self) -> None:
        """Ballot after ballot, until one decides or there has been no quorum for long."""
        options, begun = self._mates.options, loop_time()
        wait, pauses = options.first_pause, growing(options.first_pause, options.longest_pause)
        quorum, guarded = min(begun, self._first_lost), self._votes.guarded is not None
        longest = options.search + options.per_liar * self._votes.quorum.hostile
        while not self._settled.is_set():
            await _first(self._passed_over, within=wait)
            self._passed_over.clear()
            if guarded and loop_time() > quorum + longest:
                self.stop()
                return
            decided = await self._proposer.attempt(self._give_up, self._attendance.strangers)
            decided = decided or await self._outcome_of_another_leader()
            quorum = loop_time() if self._proposer.had_quorum else quorum  # a ballot may fail, and take long for it
            if decided is not None and self.learn(decided):
                return
            pause = next(pauses) * (1 + self._mates.endpoint.random.random())
            wait = pause + options.trips * self._mates.slowest_round_trip
            search = min(quorum + longest, begun + options.longest_search)
            if self._proposer.deserted:
                search = min(search, min(quorum, self._troubled) + options.search_deserted)
                wait = min(wait, max(options.first_pause, search - loop_time()))
            if loop_time() > search:
                self.stop()

    async def _outcome_of_another_leader(self) -> messages.Decided | None:
        """If others follow a leader of a lower rank, and it can be reached by now, this member follows it too."""
        leader, ranks = self._proposer.follows, self._mates.ranks
        if leader in self._passed:
            return self._votes.decided  # members that still follow it will pass it over too
        if leader is None or ranks.get(leader, math.inf) >= ranks[self._mates.me] or not await self._takes_part(leader):
            return self._votes.decided
        self._following = leader
        decided = await self._ask_unless_passed_over(leader)
        self._following = self._mates.me
        if self._passed_over.is_set():
            self._passed.add(leader)
            self._passed_over.clear()
        return decided

    def _lose(self, member: int, reason: str) -> None:
        """A member is out of this leader's reach."""
        if self._following != self._mates.me or self._settled.is_set():
            return
        self._proposer.absent.add(member)
        if self._zero is not None:
            self._zero.lose(member)
        self._announce(member, reason)
        self._check_zero()

    def _announce(self, member: int, reason: str) -> None:
        """Tells all that nobody need wait for a member: above all the reducers, which do not notice it themselves."""
        self._absent.put_nowait(
            messages.AbsenceNotice(self._mates.group.group_id, member, reason[: messages.MAX_WORDS])
        )
        self._parts.absent(member, reason)

    async def _tell_of_absence(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                notice = await self._absent.get()
                for other in self._mates.others:
                    if other != notice.member:
                        tasks.create_task(self._tell(other, notice))

    async def _tell(self, other: int, notice: messages.AbsenceNotice) -> None:
        while True:
            try:
                await self._mates.ask(other, "absence", notice, messages.Noted, self._mates.options.at_once)
                return
            except CallRefused:
                # The member has not noticed yet that its leader is gone, which takes up to 20 s if that is frozen. If
                # it did not hear the notice again, it would wait a minute for the absent member.
                await asyncio.sleep(self._mates.options.questions[0])
            except NetworkError:
                return  # its own patience does the same, later

    def _check_zero(self) -> None:
        if self._zero is not None and self._zero.decided is not None:
            self.learn(self._zero.decided)

    # Time

    async def _watch_time(self) -> None:
        """The leader gives the round up at its deadline, or when votes stay out long after its own."""
        leads, patience, limit = self._zero is not None, self._options.for_reducer, self._options.allreduce_timeout
        options = self._mates.options
        grace = min(options.grace, limit or options.grace) + options.grace_trips * self._mates.slowest_round_trip
        try:
            async with asyncio.timeout(limit if limit is None or leads else limit + grace):
                await self._gathered.wait()
                await asyncio.sleep(patience if leads else 2 * patience + grace)
            self._give_up = f"not all members have voted within {patience:.0f} s after the leader"
        except TimeoutError:
            self._give_up = f"the round took longer than its {limit:g} s"
        self._hurry.set()
        if leads:
            await asyncio.sleep(grace)
        self.stop()


async def _first(*events: asyncio.Event, within: float | None = None) -> None:
    """Waits until one of the events is set, or so many seconds have passed."""
    async with asyncio.TaskGroup() as tasks:
        waits = [tasks.create_task(event.wait()) for event in events]
        await asyncio.wait(waits, timeout=within, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
