"""Counts votes: those of ballot zero at the leader of a group, those of each ballot above zero at its proposer.

    ballot zero   votes of members that hold everything ─▶ enough for one digest decide
    above zero    Prepare ─▶ the values that a quorum has accepted, and the averages that they hold
                  Propose ─▶ the result that may have been chosen; if none can have been, one that a quorum holds, or
                  another try with the held averages, or to give the round up; a quorum decides

`ballots.py` says what may be proposed, and `strangers.py` where some members may lie: there a quorum's votes are only a
certificate, which all compare before they confirm it (`comparing.py`).

A member that is asked to accept a result and does not hold it copies it first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any, Protocol

import msgspec

from swarmcli.averaging.consensus import messages
from swarmcli.averaging.consensus.acceptor import RoundVotes
from swarmcli.averaging.consensus.ballots import (
    ZERO,
    Bound,
    Free,
    Proposal,
    Refusal,
    Tally,
    Value,
    Waiting,
    ballot_after,
)
from swarmcli.averaging.consensus.certificate import signed, value_hash
from swarmcli.averaging.consensus.comparing import gather_confirms
from swarmcli.averaging.consensus.presence import GroupCalls
from swarmcli.averaging.consensus.strangers import GuardedProposal, GuardedTally
from swarmcli.errors import CallRefused, NetworkError, UnknownMethod
from swarmcli.network.loop_thread import loop_time, set_within


class BallotZero:
    """Ballot zero at the leader: members that hold the whole result vote for it, and enough of them commit it.

    In a group that is not guarded it counts until the leader itself has promised a ballot above zero: from then on
    ballot zero is dead.
    """

    def __init__(self, mates: GroupCalls, votes: RoundVotes) -> None:
        self.failed = asyncio.Event()  # this ballot comes to no decision by itself
        self.enough = asyncio.Event()  # in a guarded group: so many have voted, or cannot, that the rest get a moment
        self.decided: messages.Decided | None = None
        self._began = loop_time()
        self._complete = asyncio.Event()  # no other member is expected to vote
        self._mates, self._votes = mates, votes
        self._tally = Tally(len(mates), mates.group.auxiliaries)
        self._guarded = GuardedTally(votes.electorate)
        self._signatures: dict[int, bytes] = {}
        self._ended: set[int] = set()  # members that have said how their exchange ended
        self._voted, self._named = asyncio.Event(), asyncio.Event()  # a member has; the auxiliaries are to be asked

    def hear(self, voter: int, vote: messages.VoteMessage) -> None:
        """A member holds the result, or says that it will not. Its first vote stands.

        Raises CallRefused for a vote without the voter's signature.
        """
        self._ended.add(voter)
        if vote.digest is None:
            self.lose(voter)
            return
        signature, value = vote.signature, messages.Committed(vote.digest)
        if signature is None or not self._votes.is_vote(voter, ZERO, value, signature):
            raise CallRefused("vote", "a vote is signed by the voter")
        if self._votes.guarded is not None:
            self._guarded.accept(voter, vote.digest, signature)
            self._votes.note(messages.Certificate(ZERO, "vote", value_hash(value), {voter: signature}))
        elif self._votes.acceptor.promised == ZERO:
            self._accept(voter, vote.digest, signature)
        self._look()

    def lose(self, member: int) -> None:
        """A member is out of reach. A vote that it has cast stands, and one that still arrives counts."""
        self._tally.lose(member)
        self._guarded.lose(member)
        self._look()

    async def prepared(self) -> messages.Prepared | None:
        """In a guarded group: a quorum's votes for one result, once the others have had a moment to vote too. None: no
        quorum has voted for one."""
        await self.enough.wait()
        options = self._mates.options
        moment = min(options.for_all, options.for_all_share * (loop_time() - self._began))
        await set_within(self._complete, moment + self._mates.slowest_round_trip)
        return self._guarded.prepared

    async def ask_auxiliaries(self, heard: Callable[[], None], patience: float) -> None:
        """Names the result to the auxiliaries, once their votes are needed, or `patience` seconds after the first vote;
        `heard` is called after each answer."""
        await self._voted.wait()
        await set_within(self._named, patience)
        digest = self._tally.held_by_most
        if digest is None or self._votes.acceptor.promised > ZERO:
            return
        async with asyncio.TaskGroup() as tasks:
            for member in sorted(self._mates.group.auxiliaries):
                tasks.create_task(self._ask_auxiliary(member, digest, heard))

    async def _ask_auxiliary(self, member: int, digest: bytes, heard: Callable[[], None]) -> None:
        question = messages.Propose(self._mates.group.group_id, ZERO, messages.Committed(digest))
        signature: bytes | None = None
        try:
            if member == self._mates.me:
                signature = self._votes.vote_zero(digest)
            else:
                signature = (await self._mates.ask(member, "propose", question, messages.ProposeAnswer)).signature
        except NetworkError:
            pass
        valid = signature is not None and self._votes.is_vote(member, ZERO, question.value, signature)
        if valid and signature is not None and self._votes.acceptor.promised == ZERO:
            self._accept(member, digest, signature)
            self._look()
        else:
            self.lose(member)
        heard()

    def _accept(self, member: int, digest: bytes, signature: bytes) -> None:
        self._signatures.setdefault(member, signature)
        self._voted.set()
        decision = self._tally.accept(member, digest)
        if decision is not None:
            supporters = {each: self._signatures[each] for each in self._tally.supporters(digest)}
            self.decided = messages.Decided(decision, signed(supporters, ZERO, "accept", decision))

    def _look(self) -> None:
        if self._votes.guarded is not None:
            self.decided = self._guarded.decided
            quorum = self._votes.quorum
            if quorum.decides(self._ended) or self._guarded.prepared is not None:
                self.enough.set()
            if self._guarded.complete:
                self._complete.set()
            if self.decided is None and self._guarded.hopeless:
                self.failed.set()
            return
        if self._tally.decision is not None:
            return
        # Where most members with tensors live and lack the result, the leader does not wait for the others: they may
        # have been too slow for these, or hold the result alone.
        lacking = self._ended - self._signatures.keys() - self._mates.group.auxiliaries
        if self._tally.hopeless or 2 * len(lacking) >= len(self._mates) - len(self._mates.group.auxiliaries):
            self.failed.set()
            return
        # Where the votes of members with tensors may be enough, the leader does not ask auxiliaries.
        if self._tally.digest_to_name is not None and self._tally.needs_auxiliaries:
            self._named.set()


class Parts(Protocol):
    """The parts of a round as consensus sees them: the averages at this member, and the members that nobody awaits."""

    @property
    def busy(self) -> bool:
        """Whether copies are on their way to this member."""

    @property
    def patience(self) -> float:
        """Seconds that one member may be slower than the others."""

    def report(self) -> messages.Report: ...
    def holds(self, digest: bytes) -> bool:
        """Whether the whole result of this digest is here."""

    async def obtain(self, digest: bytes) -> None:
        """Tries to get this result, by copies of the averages that others hold."""

    def again(self, reports: Mapping[int, messages.Report]) -> messages.Again | None:
        """How the reporting members can try again; None: they cannot."""

    def absent(self, member: int, reason: str) -> None:
        """Nobody need wait for a member if it has not come by now."""


class Proposer:
    """All ballots of one member in one round."""

    def __init__(self, mates: GroupCalls, votes: RoundVotes, parts: Parts, doubted: Set[int] = frozenset()) -> None:
        """`doubted`: members that this one itself has found too slow; may grow."""
        self.follows: int | None = None  # a member of a lower rank that leads, as others see it
        self.had_quorum = False  # in the last ballot enough members have promised
        self.absent: set[int] = set()  # set from outside: members that are out of reach, or do not come
        self.deserted = False  # in the last ballot too few for a quorum could be reached, and that was plain at once
        self._mates, self._votes, self._parts, self._doubted = mates, votes, parts, doubted
        self._highest = 0  # ballot that was used here or named by others
        self._among: set[int] = set()  # members that are asked in the present ballot
        self._closed: set[int] = set()  # members that have closed their averager, though they may be connected
        self._named: set[int] = set()  # members that a promise names as too slow, or out of reach
        self._hasty = False
        self._began = 0.0  # the first ballot, by the clock of the loop

    async def attempt(self, give_up: str = "", without: Collection[int] = ()) -> messages.Decided | None:
        """One ballot. `give_up`: why the round is to be given up, if it is. `without`: members that are known not to
        take part. Returns the decision if there is one."""
        seen = max(self._highest, self._votes.acceptor.promised)
        self._highest = ballot_after(seen, self._mates.me, len(self._mates))
        self._began = self._began or loop_time()
        proposal: Proposal | GuardedProposal = Proposal(self._highest, len(self._mates))
        if self._votes.guarded is not None:
            proposal = GuardedProposal(self._highest, self._votes.electorate)
        for member in without:
            proposal.lose(member)
        self._among = set(self._mates.others) - set(without)
        self._hasty = bool(give_up)
        began = loop_time()
        known, promised = await self._prepare(proposal)
        at_once = loop_time() - began < self._mates.options.refuses + self._trips
        quorum = self._votes.quorum
        there = self._among - self._closed
        in_reach = {member for member in there if self._mates.is_connected(member)} | {self._mates.me}
        self.deserted = at_once and not quorum.decides(in_reach)
        self.had_quorum = quorum.decides(promised)
        if known is not None:
            return known
        value = self._value(proposal, promised, give_up)
        return None if value is None else await self._propose(proposal, value)

    # Phase 1

    async def _prepare(
        self, proposal: Proposal | GuardedProposal
    ) -> tuple[messages.Decided | None, dict[int, messages.PrepareAnswer]]:
        """The decision, if a member knows it; and the answers that promise. To give up, fewer promises are enough."""
        self.follows = None
        prepare = messages.Prepare(self._mates.group.group_id, proposal.ballot)
        promised: dict[int, messages.PrepareAnswer] = {}
        own = self._votes.prepare(proposal.ballot)
        self._note(proposal, self._mates.me, own, promised)

        def hear(member: int, answer: messages.PrepareAnswer | None) -> messages.Decided | None:
            if answer is not None and answer.decided is not None:
                return self._proved(answer.decided)
            if answer is not None:
                self._votes.note_all(answer.twice)
            self._note(proposal, member, answer, promised)
            return None

        def enough() -> bool:
            return not isinstance(proposal.state, Waiting) or (self._hasty and proposal.may_abort)

        known = await self._ask_all("prepare", prepare, messages.PrepareAnswer, hear, enough)
        if self._mates.me in promised:
            promised[self._mates.me] = msgspec.structs.replace(own, report=self._parts.report())
        return known, promised

    def _proved(self, decided: messages.Decided) -> messages.Decided | None:
        """The decision that another member tells, if its votes prove it."""
        return self._votes.decided if self._votes.learn(decided) else None

    def _note(
        self,
        proposal: Proposal | GuardedProposal,
        member: int,
        answer: messages.PrepareAnswer | None,
        promised: dict[int, messages.PrepareAnswer],
    ) -> None:
        if answer is None:
            proposal.lose(member)
        elif self._is_promise(proposal, member, answer):
            promised[member] = answer
            self._named.update(() if answer.report is None else answer.report.failed)
        else:
            proposal.refuse(member, Refusal(answer.promised))
            self._see(answer.promised)
            self.follows = answer.follows if answer.follows is not None else self.follows

    def _is_promise(self, proposal: Proposal | GuardedProposal, member: int, answer: messages.PrepareAnswer) -> bool:
        """Whether the answer counts. In a guarded group auxiliaries promise nothing, and their reports count too."""
        if isinstance(proposal, Proposal):
            if answer.promise is not None:
                proposal.promise(member, answer.promise)
            return answer.promise is not None
        if member not in self._votes.quorum.voters:
            return member == self._mates.me or answer.report is not None
        if answer.signed is not None:
            if answer.prepared is not None:
                self._votes.see(answer.prepared)
            proposal.promise(member, answer.signed, answer.prepared)
        return member in proposal.promises

    def _see(self, ballot: int) -> None:
        """The next ballot here goes beyond those that others name; but no single word drives it up without bound."""
        self._highest = max(self._highest, min(ballot, self._highest + len(self._mates) ** 2))

    # Between the phases

    def _value(
        self, proposal: Proposal | GuardedProposal, promised: dict[int, messages.PrepareAnswer], give_up: str
    ) -> Value | None:
        """The value to propose; None: nothing, in this ballot."""
        reports = {member: answer.report for member, answer in promised.items() if answer.report is not None}
        match proposal.state:
            case Bound(value):
                return value
            case Free():
                hope = None if give_up else self._held(reports, promised) or self._parts.again(reports)
                return hope or self._aborted(reports, give_up or "the members that are left cannot try again")
        if proposal.may_abort and (self.follows is None or self._among <= self._doubted):
            return self._aborted(reports, give_up or "too few members are left to commit a result")
        return None

    def _held(self, reports: Mapping[int, messages.Report], promised: Collection[int]) -> messages.Committed | None:
        """The result that enough members can accept at once, if there is one: its holders, and auxiliaries that vote.

        A proposer does not propose a result that fewer hold. A member that accepts it binds all later ballots to it,
        and the others may be unable to copy it: its only holder may be lost meanwhile, or lie.
        """
        quorum, failed = self._votes.quorum, {member for report in reports.values() for member in report.failed}
        # The others would wait for copies from members that were too slow for them, or out of their reach.
        free = {report.digest for member, report in reports.items() if member not in failed}
        helpers = self._mates.group.auxiliaries.intersection(promised)
        for digest in sorted({report.digest for report in reports.values() if report.digest is not None} & free):
            holders = {member for member, report in reports.items() if report.digest == digest}
            if quorum.decides(holders | helpers):
                return messages.Committed(digest)
        return None

    def _aborted(self, reports: Mapping[int, messages.Report], why: str) -> messages.Aborted:
        """Names the reasons of all members, and the suspects: silent members, and those that more members name than can
        be hostile."""
        members, quorum = set(range(len(self._mates))), self._votes.quorum
        namers = {member: [each for each, report in reports.items() if member in report.failed] for member in members}
        named = {member for member, those in namers.items() if quorum.weight(those) > quorum.hostile}
        suspects = (members - reports.keys()) | named
        words = "; ".join(filter(None, dict.fromkeys([why, *(report.reason for report in reports.values())])))
        return messages.Aborted(words[: messages.MAX_WORDS], tuple(sorted(suspects & members)))

    # Phase 2

    async def _propose(self, proposal: Proposal | GuardedProposal, value: Value) -> messages.Decided | None:
        proposal.propose(value)
        message = messages.Propose(self._mates.group.group_id, proposal.ballot, value)
        if isinstance(proposal, GuardedProposal):
            message = msgspec.structs.replace(message, promises=proposal.promises, prepared=proposal.prepared)
        if isinstance(value, messages.Committed):
            await self._parts.obtain(value.digest)
        held = isinstance(value, messages.Committed) and self._parts.holds(value.digest)
        signatures: dict[int, bytes] = {}

        def hear(member: int, answer: messages.ProposeAnswer | None) -> messages.Decided | None:
            if answer is not None and answer.decided is not None:
                return self._proved(answer.decided)
            if answer is None:
                proposal.lose(member)
            elif answer.signature is None or not self._votes.is_vote(member, proposal.ballot, value, answer.signature):
                self._see(answer.promised)
                proposal.refuse(member, Refusal(answer.promised))
            elif isinstance(proposal, GuardedProposal):
                proposal.voted(member, answer.signature)
            else:
                signatures[member] = answer.signature
                if proposal.accepted(member) is not None:
                    return messages.Decided(value, signed(signatures, proposal.ballot, "accept", value))
            return None

        def enough() -> bool:
            voted = isinstance(proposal, GuardedProposal) and proposal.certificate is not None
            return voted or not isinstance(proposal.state, Waiting)

        decided = hear(self._mates.me, self._votes.accept(message, held))
        if decided is None:
            decided = await self._ask_all("propose", message, messages.ProposeAnswer, hear, enough)
        prepared = proposal.certificate if isinstance(proposal, GuardedProposal) else None
        if decided is None and prepared is not None:
            decided = await gather_confirms(self._mates, self._votes, prepared)
        return decided

    # Asking

    @property
    def _trips(self) -> float:
        """Seconds of a few round trips."""
        return self._mates.options.trips * self._mates.slowest_round_trip

    async def _ask_all(
        self,
        name: str,
        request: Any,
        answer_type: type[Any],
        hear: Callable[[int, Any], messages.Decided | None],
        enough: Callable[[], bool],
    ) -> messages.Decided | None:
        """Asks the others at the same time, and gives each answer to `hear` (None: the member cannot be reached) until
        that returns a decision, which is returned. Once there are `enough`, stragglers get a moment and no more."""
        options = self._mates.options

        async def ask(member: int) -> tuple[int, Any]:
            try:
                return member, await self._mates.ask(member, name, request, answer_type)
            except NetworkError as error:
                if isinstance(error, UnknownMethod):
                    self._closed.add(member)
                return member, None

        async with asyncio.TaskGroup() as tasks:
            asked = {tasks.create_task(ask(member)): member for member in sorted(self._among)}
            waiting = set(asked)
            try:
                while waiting:
                    patience, others = None, {asked[task] for task in waiting}
                    if enough():
                        connected = any(map(self._mates.is_connected, others - self._named))
                        patience = options.unreached
                        if connected:  # no more than a member may be slower than the others
                            patience = min(options.stragglers, 2 * self._parts.patience)
                        if self._hasty or others <= self._doubted:
                            patience = min(patience, options.haste + self._trips)
                    elif not any(map(self._mates.is_connected, others - self._doubted - self.absent)):
                        # A member that refuses may soon follow the proposer. Otherwise these members are needed: each
                        # ballot gives them more time.
                        tried = loop_time() - self._began
                        patience = options.unreached + self._trips + min(tried, options.stragglers)
                    timeout = options.look if patience is None else patience
                    done, waiting = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                    for task in sorted(done, key=lambda each: asked[each]):
                        decision = hear(*task.result())
                        if decision is not None:
                            return decision
                    if not done and patience is not None:
                        break
            finally:
                for task in waiting:
                    task.cancel()
        return None
