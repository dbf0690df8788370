"""A ballot above zero at its proposer: what it asks the others, and what it makes of their answers.

    Prepare ─▶ what a majority has accepted, and which averages they hold
    Repair  ─▶ those who promised come to hold one result (copies; deputies for what nobody holds)
    Propose ─▶ that result, or that the round is given up; a majority that accepts decides

`ballots.py` says what may be proposed, `repair.py` how the group comes to one result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any, Protocol

from swarmcli.averaging.agreement.ballot_messages import (
    DIGEST_BYTES,
    Prepare,
    PrepareAnswer,
    Propose,
    ProposeAnswer,
    Repair,
    RepairAnswer,
    Verdict,
)
from swarmcli.averaging.agreement.ballots import Bound, Free, Proposal, Refusal, Value, Waiting, ballot_after, majority
from swarmcli.averaging.agreement.mates import Mates
from swarmcli.averaging.agreement.outcome import Aborted, Committed, Decision
from swarmcli.averaging.agreement.votes import RoundVotes
from swarmcli.averaging.allreduce.repair import RepairPlan, plan_repair
from swarmcli.errors import NetworkError

REPAIRS = 4  # tries to come to one result, after which the round is given up

_STRAGGLERS = 10.0  # seconds for a member that is connected and still receives averages, once a majority has promised
_UNREACHED = 1.0  # the same for members without a connection
_HASTE, _ROUND_TRIPS = 0.05, 4.0  # seconds and round trips, where the round is past its deadline
_AT_ONCE = 0.5  # seconds in which a dialed port refuses; one that is cut off or frozen says nothing


class Bench(Protocol):
    """The proposer's own part in a repair, as of any member."""

    @property
    def parts(self) -> int:
        """How many the plan of the round has."""

    def holds(self, digest: bytes) -> bool: ...
    def disclose(self, promise: PrepareAnswer) -> PrepareAnswer: ...
    async def mend(self, order: Repair) -> RepairAnswer: ...


class Proposer:
    """All ballots of one member in one round."""

    def __init__(self, mates: Mates, votes: RoundVotes, bench: Bench, patience: float) -> None:
        """`patience`: seconds that a repair may take."""
        self.follows: int | None = None  # a member of a lower rank that leads, as others see it
        self.had_quorum = False  # in the last ballot a majority promised
        self.deserted = False  # in the last ballot nobody could be reached, and that was plain at once
        self._mates, self._votes, self._bench, self._patience = mates, votes, bench, patience
        self._highest = 0  # ballot that was used here or heard of
        self._suspects: dict[int, str] = {}
        self._repairs = 0
        self._among: set[int] = set()  # who is asked in the present ballot
        self._hasty = False

    async def attempt(self, give_up: str = "", without: Collection[int] = ()) -> Decision | None:
        """One ballot. `give_up`: why the round is to be given up, if it is. `without`: members that are known not to
        take part. Returns the decision if there is one."""
        seen = max(self._highest, self._votes.acceptor.promised)
        self._highest = ballot_after(seen, self._mates.me, len(self._mates))
        proposal = Proposal(self._highest, len(self._mates))
        for member in without:
            proposal.lose(member)
        self._among = set(self._mates.others) - set(without)
        self._hasty = bool(give_up)
        began = asyncio.get_running_loop().time()
        known, promised = await self._prepare(proposal)
        at_once = asyncio.get_running_loop().time() - began < _AT_ONCE + _ROUND_TRIPS * self._mates.slowest_round_trip
        self.deserted = at_once and not any(map(self._mates.is_connected, self._mates.others))
        self.had_quorum = len(promised) >= majority(len(self._mates))
        if known is not None:
            return known
        value = await self._value(proposal, promised, give_up)
        return None if value is None else await self._propose(proposal, value)

    # Phase 1

    async def _prepare(self, proposal: Proposal) -> tuple[Decision | None, dict[int, PrepareAnswer]]:
        """The decision, if somebody knows it; and what those say who promised. To give up, enough for that will do."""
        self.follows = None
        prepare = Prepare(self._mates.group.group_id, proposal.ballot)
        promised: dict[int, PrepareAnswer] = {}
        own = self._votes.prepare(proposal.ballot)
        self._note(proposal, self._mates.me, own, promised)

        def hear(member: int, answer: PrepareAnswer | None) -> Decision | None:
            if answer is not None and answer.verdict is not None:
                return answer.verdict.decision()
            self._note(proposal, member, answer, promised)
            return None

        def enough() -> bool:
            return not isinstance(proposal.state, Waiting) or (self._hasty and proposal.may_abort)

        known = await self._ask_all("prepare", prepare, PrepareAnswer, hear, enough)
        if self._mates.me in promised:
            promised[self._mates.me] = self._bench.disclose(own)
        return known, promised

    def _note(
        self, proposal: Proposal, member: int, answer: PrepareAnswer | None, promised: dict[int, PrepareAnswer]
    ) -> None:
        try:
            word = None if answer is None else answer.answer()
        except ValueError:
            word = None  # no honest acceptor says that
        if answer is None or word is None:
            proposal.lose(member)
        elif isinstance(word, Refusal):
            proposal.refuse(member, word)
            self._highest = max(self._highest, min(word.promised, self._highest + len(self._mates) ** 2))
            self.follows = answer.follows if answer.follows is not None else self.follows
        else:
            proposal.promise(member, word)
            promised[member] = answer

    # Between the phases

    async def _value(self, proposal: Proposal, promised: dict[int, PrepareAnswer], give_up: str) -> Value | None:
        """What to propose, once enough members can accept it; None: nothing, in this ballot."""
        match proposal.state:
            case Bound(Aborted() as value):
                return value
            case Bound(Committed(digest) as value):
                plan = self._plan(promised, digest)
                # Without a plan those who hold the result already may still be enough.
                return value if plan is None or await self._repair(proposal, promised, plan, digest) else None
            case Free():
                return await self._free_value(proposal, promised, give_up)
        if proposal.may_abort and self.follows is None:
            return self._aborted(promised, give_up or "too few members are left to commit a result")
        return None

    async def _free_value(self, proposal: Proposal, promised: dict[int, PrepareAnswer], give_up: str) -> Value | None:
        if give_up or self._repairs == REPAIRS:
            return self._aborted(promised, give_up or f"{REPAIRS} repairs have failed")
        self._repairs += 1
        plan = self._plan(promised, None)
        if plan is None:
            return self._aborted(promised, "what is missing can neither be copied nor reduced again")
        if len(plan.members | (self._mates.auxiliaries & promised.keys())) < majority(len(self._mates)):
            return self._aborted(promised, "too few members are left that could come to hold one result")
        held = await self._repair(proposal, promised, plan)
        return None if held is None else Committed(held)

    def _aborted(self, promised: dict[int, PrepareAnswer], why: str) -> Aborted:
        """Names the reasons of all, and those whose fault it seems to be: who is silent is suspected too."""
        reasons = [answer.reason for answer in promised.values() if answer.reason] + list(self._suspects.values())
        suspects = {suspect for answer in promised.values() for suspect in answer.suspects} | self._suspects.keys()
        suspects |= set(range(len(self._mates))) - promised.keys()
        words = "; ".join(dict.fromkeys([why, *reasons]))[:500]
        return Aborted(words, tuple(sorted(index for index in suspects if index < len(self._mates))))

    def _plan(self, promised: dict[int, PrepareAnswer], wanted: bytes | None) -> RepairPlan | None:
        own, whole = self._bench.disclose(PrepareAnswer()), self._bench.parts * DIGEST_BYTES
        holdings = {
            member: answer.digests
            for member, answer in promised.items()
            if len(answer.digests) == whole and answer.plan == own.plan
        }
        if not whole or not holdings:
            return None
        # Who is named by those who lack averages may be honest and cut off from them: it is only the last to be asked.
        doubted = {suspect for answer in promised.values() for suspect in answer.suspects}
        return plan_repair(
            self._mates.group.members,
            holdings,
            self._bench.parts,
            suspects=self._suspects,
            doubted=doubted,
            wanted=wanted,
        )

    async def _repair(
        self, proposal: Proposal, promised: dict[int, PrepareAnswer], plan: RepairPlan, wanted: bytes | None = None
    ) -> bytes | None:
        """Brings those who promised to one result; its digest, if enough of the group can then accept it."""
        members = tuple(sorted(plan.members))
        parts, sources = tuple(sorted(plan.sources)), tuple(source for _, source in sorted(plan.sources.items()))
        order = Repair(self._mates.group.group_id, proposal.ballot, members, plan.digests, parts, sources)
        held: dict[int, bytes | None] = {}

        def hear(member: int, answer: RepairAnswer | None) -> None:
            held[member] = None if answer is None else answer.digest
            if answer is not None and answer.digest is None:
                self._suspects.update((suspect, answer.reason) for suspect in answer.suspects if suspect != member)

        async with asyncio.TaskGroup() as tasks:
            own = tasks.create_task(self._bench.mend(order))
            among = set(members) - {self._mates.me}
            await self._ask_all("repair", order, RepairAnswer, hear, lambda: False, among, self._patience)
        hear(self._mates.me, own.result())
        return self._common(held, promised, wanted)

    def _common(
        self, held: dict[int, bytes | None], promised: dict[int, PrepareAnswer], wanted: bytes | None
    ) -> bytes | None:
        """The result that those with tensors hold now, if with the auxiliaries they are a majority."""
        auxiliaries = self._mates.auxiliaries
        digests = {digest for member, digest in held.items() if digest is not None and member not in auxiliaries}
        if len(digests) != 1 or (wanted is not None and digests != {wanted}):
            return None
        (digest,) = digests
        holders = sum(each == digest for member, each in held.items() if member not in auxiliaries)
        return digest if holders + len(auxiliaries & promised.keys()) >= majority(len(self._mates)) else None

    # Phase 2

    async def _propose(self, proposal: Proposal, value: Value) -> Decision | None:
        proposal.propose(value)
        message = Propose(self._mates.group.group_id, proposal.ballot, Verdict.of(value))
        own = self._votes.accept(proposal.ballot, value, self._bench.holds)

        def hear(member: int, answer: ProposeAnswer | None) -> Decision | None:
            if answer is not None and answer.verdict is not None:
                return answer.verdict.decision()
            if answer is not None and answer.accepted:
                return proposal.accepted(member)
            if answer is None:
                proposal.lose(member)
            else:
                self._highest = max(self._highest, min(answer.promised, self._highest + len(self._mates) ** 2))
                proposal.refuse(member, Refusal(answer.promised))
            return None

        decision = hear(self._mates.me, own)
        if decision is None:
            decision = await self._ask_all(
                "propose", message, ProposeAnswer, hear, lambda: not isinstance(proposal.state, Waiting)
            )
        return decision

    # Asking

    async def _ask_all(
        self,
        name: str,
        request: Any,
        answer_type: type[Any],
        hear: Callable[[int, Any], Decision | None],
        enough: Callable[[], bool],
        among: set[int] | None = None,
        limit: float | None = None,
    ) -> Decision | None:
        """Asks the others at the same time, and tells `hear` of each answer (None: it cannot be reached) until that
        returns a decision, which is returned. Once there are `enough`, stragglers get a moment and no more."""

        async def ask(member: int) -> tuple[int, Any]:
            try:
                return member, await self._mates.ask(member, name, request, answer_type)
            except NetworkError:
                return member, None

        async with asyncio.TaskGroup() as tasks:
            members = sorted(self._among if among is None else among)
            asked = {tasks.create_task(ask(member)): member for member in members}
            waiting = set(asked)
            try:
                while waiting:
                    patience = limit
                    if enough():
                        connected = any(self._mates.is_connected(asked[task]) for task in waiting)
                        patience = _STRAGGLERS if connected else _UNREACHED
                        if self._hasty:
                            patience = min(patience, _HASTE + _ROUND_TRIPS * self._mates.slowest_round_trip)
                    done, waiting = await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                    for task in sorted(done, key=lambda each: asked[each]):
                        decision = hear(*task.result())
                        if decision is not None:
                            return decision
                    if not done:
                        break
            finally:
                for task in waiting:
                    task.cancel()
        return None
