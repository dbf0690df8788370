"""One round of averaging at one member: a butterfly all-reduce with one outcome for the whole group.

Sending, adding and receiving overlap. Inputs are only read; results lie in memory of their own until the group has
decided, so a round that fails changes nothing. When reducers are lost, those who are left begin again, in up to four
tries (`attempt.py`); what somebody holds by then is copied, and only what nobody holds is sent and added again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from swarmcli.averaging.config import MAX_WEIGHT, MIN_WEIGHT, AllreduceOptions
from swarmcli.averaging.consensus.outcome import Again, Committed, Decision, conclude
from swarmcli.averaging.group import Group
from swarmcli.averaging.round.attempt import Attempt
from swarmcli.averaging.round.holdings import Holdings
from swarmcli.averaging.round.layout import Layout, Plan
from swarmcli.averaging.round.reducer import Average, beyond_sums
from swarmcli.averaging.round.results import AllreduceResult, contributions, result_digest
from swarmcli.averaging.round.sending import Contribution
from swarmcli.averaging.round.service import AllreduceService, tries
from swarmcli.averaging.round.vector import Inputs, Results
from swarmcli.errors import RoundUndecided
from swarmcli.tasks import forgetful, on_executor


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
        before committed in memory, and no step by itself in files; and a step has one try.

        Raises ValueError for a weight that is neither zero nor one that reducers accept, and for tensors that have
        no mean; KeyError if this peer is not in the group.
        """
        if weight != 0 and not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise ValueError(f"weight must be 0, or {MIN_WEIGHT} to {MAX_WEIGHT}, got {weight}")
        self.group = group
        self._auxiliary = group.members[group.index_of(service.endpoint.peer_id)].auxiliary
        self._service = service
        self._options = options if options is not None else AllreduceOptions()
        self._tensors, self._weight, self._step = tensors, weight, step
        layout = Layout.of(tensors, self._options.compression, self._options.tensor_infos)
        self._plan = Plan.make(layout, group.part_shares, self._options.part_size_bytes)
        self._attempts: list[Attempt] = []
        self._late: tuple[list[torch.Tensor], tuple[Average, ...]] | None = None
        self._was_late = False
        self._mine: Contribution | None = None  # not of an auxiliary, like the next
        self._results: Results | None = None
        self._holdings: Holdings

    async def run(self) -> AllreduceResult:
        """Takes part until the round's outcome is known.

        Raises RoundFailed when the group gave it up: nothing changed anywhere. Raises RoundUndecided when this
        member could not follow the group: its tensors are untouched, others may hold averages.
        """
        if not self._step:
            self._service.release()
        await self._prepare()
        decision: Decision | None = None
        try:
            decision = await self._try_until_decided()
            if isinstance(decision, Committed):
                await self._catch_up(decision.digest)
            return self._conclude(decision)
        finally:
            self._let_go(isinstance(decision, Committed))

    async def _prepare(self) -> None:
        layout = self._plan.layout
        if not self._auxiliary:
            self._mine = await on_executor(layout.nbytes, _contribution, self._tensors, self._weight)
            self._results = Results(layout, self._service.memory.take(layout.nbytes))
        self._holdings = Holdings(self._plan, self._results)

    @forgetful
    async def _try_until_decided(self) -> Decision | None:
        groups = tries(self.group) if self._step is None else [self.group]
        decision: Decision | None = None
        spent: set[int] = set()
        with self._service.expecting(*groups[1:]):  # whoever is at the next try before this member waits for it
            for group in groups:
                again = decision if isinstance(decision, Again) else None
                attempt = Attempt(
                    self._service,
                    group,
                    self._holdings,
                    self._mine,
                    self._results,
                    self._options,
                    again,
                    spent,
                    last=group is groups[-1],
                )
                if not self._attempts:
                    attempt.mates.learn_addresses()
                self._attempts.append(attempt)
                try:
                    decision = await attempt.run()
                except asyncio.CancelledError:
                    self._service.part(*groups[len(self._attempts) :])
                    raise
                if not isinstance(decision, Again):
                    break
                self._check(decision)
        return decision

    def _check(self, again: Again) -> None:
        """Whoever proposed it may have been no honest member."""
        members = set(again.members)
        if not (set(again.reducers) <= members <= set(range(len(self.group))) and again.reducers):
            raise RoundUndecided("the group is to try again with members that it does not have")

    @forgetful
    async def _catch_up(self, digest: bytes) -> None:
        """Fetches what is missing of a committed result, from memory or files of others."""
        copier = self._attempts[-1].copier
        if copier is None or self._holdings.digest == digest:
            return
        self._was_late = True
        if not await copier.obtain(digest) and self._step is None and self._service.fetch_committed is not None:
            self._late = await self._service.fetch_committed(self.group, self._plan, digest)

    # The end

    def _conclude(self, decision: Decision | None) -> AllreduceResult:
        parts = tuple(self._holdings.averages)
        digest = self._holdings.digest
        if self._late is not None:
            parts = self._late[1]
            digest = result_digest(parts)
        if self._auxiliary and isinstance(decision, Committed):
            digest = decision.digest  # it holds no result that could differ
        members = [member.peer_id for member in self.group.members]
        conclude(digest, decision, members)
        weights, partly = contributions(self.group, parts)
        left_out: dict[int, str] = {}
        for attempt in self._attempts:
            left_out |= attempt.exchange.all_left_out | attempt.trouble.failures
        named = {members[index]: reason for index, reason in left_out.items()}
        return AllreduceResult(
            averages=self._averages() if weights else [],
            contributors=tuple(weights),
            weights=weights,
            left_out={peer: reason for peer, reason in (partly | named).items() if peer not in weights},
            digest=digest or b"",
            bytes_sent=sum(attempt.exchange.bytes_sent for attempt in self._attempts),
            bytes_received=sum(attempt.exchange.bytes_received for attempt in self._attempts),
            parts=parts,
            tries=len(self._attempts),
            late=self._was_late,
        )

    def _averages(self) -> list[torch.Tensor]:
        if self._late is not None:
            return self._late[0]
        return [] if self._results is None else self._results.tensors()

    def _let_go(self, committed: bool) -> None:
        """Errors hold on to the frames that they came through, and so to this object: not to its memory too."""
        complete = committed and self._holdings.digest is not None and self._late is None
        if complete and self._results is not None:
            self._service.keep(self._attempts[-1].group.group_id, self._holdings)
        elif self._results is not None:
            self._holdings.drop(range(len(self._plan.parts)))
            self._results.release()
        self._attempts.clear()
        self._mine = self._results = None
        del self._tensors, self._holdings


def _contribution(tensors: Sequence[torch.Tensor], weight: float) -> Contribution:
    """What this member brings; tensors that cannot be averaged are kept out of everyone's average from the start."""
    inputs = Inputs(tensors)
    if weight > 0 and not inputs.all_finite():
        return Contribution(inputs, 0.0, "its tensors hold NaN or infinity")
    if reason := beyond_sums(inputs.tensors, weight):
        return Contribution(inputs, 0.0, f"its tensors hold {reason}")
    return Contribution(inputs, weight)
