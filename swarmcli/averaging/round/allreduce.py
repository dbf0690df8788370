"""One round of averaging at one member: a butterfly all-reduce with one outcome for the whole group.

Sending, adding and receiving overlap. Inputs are only read; results lie in memory of their own until the group has
decided, so a round that fails changes nothing. When reducers are lost, the other members begin again, in up to four
tries (`attempt.py`); they copy the averages that some member holds by then, and send and add only the others again.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from swarmcli.averaging.config import MAX_WEIGHT, MIN_WEIGHT, AllreduceOptions
from swarmcli.averaging.consensus.certificate import RoundCertificate
from swarmcli.averaging.consensus.messages import MAX_WORDS, Aborted, Again, Committed, Decision
from swarmcli.averaging.consensus.quorum import Quorum
from swarmcli.averaging.group import Group
from swarmcli.averaging.round.attempt import Attempt, Avoided
from swarmcli.averaging.round.buffers import Average, Holdings, Inputs, Results, contributions_to, result_digest
from swarmcli.averaging.round.pace import Lessons, usual_time
from swarmcli.averaging.round.plan import Layout, Plan
from swarmcli.averaging.round.reducer import beyond_sums
from swarmcli.averaging.round.service import AllreduceService, tries
from swarmcli.averaging.weights import WeightBounds, limits
from swarmcli.compression.base import all_finite
from swarmcli.errors import RoundFailed, RoundUndecided
from swarmcli.network import PeerID
from swarmcli.tasks import forgetful, on_executor


@dataclass(frozen=True)
class AllreduceResult:
    """A committed round, as one member sees it; all but the bytes and, for an auxiliary, the averages are equal.

    averages      in the shapes of the inputs and beside them; read-only, for they may still be on their way to
                  others. Empty for an auxiliary, and when `total_weight` is zero: then there was nothing to average
    contributors  members whose tensors are in the average, in the group's order
    weights       theirs, by the share of their tensors that is in it: half of its weight of a member that is in the
                  parts of half of all elements. The other half is lost: it is never handed in again
    samples       theirs, likewise, bounded as the weights are: equal to these where nobody has told others
    left_out      peer → why its tensors are missing, from some part on or in all, and how much of them counts
    digest        32 bytes over averages, senders and weights
    tries         more than one if the group began again without reducers that were lost
    late          averages that were missing here were fetched after the group had committed
    failed        reducers to or from which some member could not bring parts
    nothing       why there was nothing to average, and no exchange; "" otherwise
    certificate   proves to anyone that the group has committed this digest; None without an exchange
    shares        of the work, by which the averages were cut into `parts`; none for a round of several phases, whose
                  averages were computed from the signed ones
    """

    averages: list[torch.Tensor]
    contributors: tuple[PeerID, ...]
    weights: Mapping[PeerID, float]
    samples: Mapping[PeerID, float]
    left_out: Mapping[PeerID, str]
    digest: bytes
    bytes_sent: int
    bytes_received: int
    parts: tuple[Average, ...] = field(repr=False, default=())  # in order, with the senders of each
    tries: int = 1
    late: bool = False
    failed: tuple[PeerID, ...] = ()
    nothing: str = ""
    certificate: RoundCertificate | None = field(repr=False, default=None)
    shares: tuple[float, ...] = field(repr=False, default=())

    @classmethod
    def without_exchange(cls, reason: str) -> AllreduceResult:
        """The result of a group that has nothing to average, as each of its members knows by itself."""
        return cls([], (), {}, {}, {}, b"", bytes_sent=0, bytes_received=0, nothing=reason)

    @property
    def total_weight(self) -> float:
        return math.fsum(self.weights.values())

    def reduced(self, members: Sequence[PeerID]) -> dict[PeerID, int]:
        """Reducer → bytes of the senders' tensors that it has added up, before compression. `members`: in the group's
        order. A round of several phases counts its last one."""
        sums = Counter[PeerID]()
        for average in self.parts:
            part = average.part
            sums[members[part.reducer]] += (part.stop - part.start) * part.segment.dtype.itemsize * len(average.senders)
        return dict(sums)

    @property
    def remark(self) -> str:
        """Anything unusual about the round, for people; "" for nothing."""
        remarks = [] if self.weights else [self.nothing or "nobody had any weight"]
        if self.tries > 1:
            remarks.append(f"in {self.tries} tries, since reducers were lost")
        if self.late:
            remarks.append("fetched here after the group had committed")
        return "; ".join(remarks)


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
        base: Sequence[torch.Tensor] | None = None,
        samples: float | None = None,
    ) -> None:
        """`tensors` must not change until `run` has returned. `weight` is of this member's tensors in the mean; with
        zero it takes part and adds nothing. `samples`: that they come of, if these are not the weight. An auxiliary's
        tensors only tell shapes and types, and it has no weight.
        `step`: its number, if this is one of several steps of a round: then late members find the results of the steps
        before in memory, and no single step in files; and a step has one try. `base`: the differences from these
        tensors are averaged, which all members hold alike.

        Raises ValueError for a weight that is neither zero nor one that reducers accept, and for tensors that have
        no mean; KeyError if this peer is not in the group.
        """
        if weight != 0 and not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise ValueError(f"weight must be 0, or {MIN_WEIGHT} to {MAX_WEIGHT}, got {weight}")
        self.group = group
        self._auxiliary = group.members[group.index_of(service.endpoint.peer_id)].auxiliary
        self._service = service
        self._options = options if options is not None else AllreduceOptions()
        self._tensors, self._weight, self._step, self._base = tensors, weight, step, base
        self._samples = samples if weight and samples != weight else None
        layout = Layout.of(tensors, self._options.compression, self._options.tensor_infos)
        self._plan = Plan.make(layout, group.part_shares, self._options.part_size_bytes)
        self.lessons = Lessons()  # known once `run` has ended, however it ended
        self._attempts: list[Attempt] = []
        self._late: tuple[list[torch.Tensor], tuple[Average, ...]] | None = None
        self._was_late = False
        self._again: Again | None = None  # the decision of the last try but one
        self._mine: Inputs | None = None  # not of an auxiliary
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
        layout, results = self._plan.layout, None
        if not self._auxiliary:
            mine = self._tensors, self._weight, self._base, self._samples
            self._mine = await on_executor(layout.nbytes, _checked_inputs, *mine)
            results = Results(layout, self._service.memory.take(layout.nbytes))
        self._holdings = Holdings(self._plan, results)
        for member in self.group.members:
            if member.addresses:
                self._service.endpoint.learn(member.peer_id, member.addresses)

    @forgetful
    async def _try_until_decided(self) -> Decision | None:
        groups = tries(self.group) if self._step is None else [self.group]
        decision: Decision | None = None
        avoided = Avoided()
        with self._service.expecting(*groups[1:]):  # members that are at the next try before this one wait for it
            for group in groups:
                attempt = Attempt(
                    self._service,
                    group,
                    self._holdings,
                    self._mine,
                    self._options,
                    decision if isinstance(decision, Again) else None,
                    avoided,
                    last=group is groups[-1],
                )
                self._attempts.append(attempt)
                try:
                    decision = await attempt.run()
                except asyncio.CancelledError:
                    self._service.leave(*groups[len(self._attempts) :])
                    raise
                if not isinstance(decision, Again):
                    break
                self._again, members = decision, set(decision.members)
                # Its proposer may have been no honest member.
                if not (set(decision.reducers) <= members <= set(range(len(self.group))) and decision.reducers):
                    raise RoundUndecided("the group is to try again with members that it does not have")
        return decision

    @forgetful
    async def _catch_up(self, digest: bytes) -> None:
        """Fetches missing parts of a committed result, from memory or files of others: within the time that a round may
        take. A member that copies over a slow link gets on sooner as one that has missed the round."""
        copier = self._attempts[-1].copier
        if copier is None or self._holdings.digest == digest:
            return
        self._was_late = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.allreduce_timeout or usual_time(self._plan.layout.nbytes)):
                if not await copier.obtain(digest) and self._step is None and self._service.fetch_committed is not None:
                    self._late = await self._service.fetch_committed(self.group, self._plan, digest)

    # The end

    def _conclude(self, decision: Decision | None) -> AllreduceResult:
        parts = tuple(self._holdings.averages)
        digest = self._holdings.digest
        if self._late is not None:
            averages, parts = self._late
            digest = result_digest(b"".join(average.digest for average in parts))
        else:
            averages = [] if self._holdings.results is None else self._holdings.results.tensors()
        if self._auxiliary and isinstance(decision, Committed):
            digest = decision.digest  # it holds no result that could differ
        members = [member.peer_id for member in self.group.members]
        if decision is None and (proofs := self._attempts[-1].evidence):
            lies = "; ".join(f"{proof.culprit.short}: {proof.words()}" for proof in proofs)
            raise RoundUndecided(f"the round is void: {lies}"[:MAX_WORDS])
        conclude(digest, decision, members)
        weights, samples, partly = contributions(self.group, parts, self._options)
        left_out: dict[int, str] = {}
        for attempt in self._attempts:
            left_out |= attempt.left_out
        named = {members[index]: reason for index, reason in left_out.items()}
        named = {peer: reason for peer, reason in named.items() if peer in partly or peer not in weights}
        return AllreduceResult(
            averages=averages if weights else [],
            contributors=tuple(weights),
            weights=weights,
            samples=samples,
            left_out=partly | {peer: "; ".join(filter(None, [partly.get(peer), why])) for peer, why in named.items()},
            digest=digest or b"",
            bytes_sent=sum(attempt.bytes_sent for attempt in self._attempts),
            bytes_received=sum(attempt.bytes_received for attempt in self._attempts),
            parts=parts,
            tries=len(self._attempts),
            late=self._was_late,
            failed=() if self._again is None else self._failed_reducers(self._again),
            certificate=self._certificate(digest),
            shares=self.group.part_shares,
        )

    def _certificate(self, digest: bytes | None) -> RoundCertificate | None:
        decided, tries = self._attempts[-1].votes.decided, len(self._attempts)
        if decided is None or digest is None:
            return None
        purposes = [f"try {tries - 1}"] if tries > 1 else []
        return RoundCertificate.of(self.group, self._options.trust, purposes, digest, decided.votes)

    def _failed_reducers(self, again: Again) -> tuple[PeerID, ...]:
        """The reducers that the last try left out, as others have named them. If these are more than two and more than
        can be hostile, only those count that failed this member itself: the others may only fail to reach each
        other."""
        failed = self._plan.by_reducer.keys() - set(again.reducers)
        quorum = Quorum(len(self.group), self.group.auxiliaries, self._options.trust, self.group.networks)
        if len(failed) > max(2, quorum.hostile):
            failed &= {member for attempt in self._attempts for member in attempt.trouble.failures}
        return tuple(self.group.members[index].peer_id for index in sorted(failed))

    def _let_go(self, committed: bool) -> None:
        """Frees the memory: errors hold on to the frames that they came through, and so to this object."""
        for number, attempt in enumerate(self._attempts):
            # In later tries only a part of everything is sent.
            sending = {} if number else {self.group.members[i].peer_id: s for i, s in attempt.sending.items()}
            doubted = {self.group.members[index].peer_id: reason for index, reason in attempt.doubted.items()}
            lost = frozenset(self.group.members[index].peer_id for index in attempt.lost)
            failed = frozenset(self.group.members[index].peer_id for index in attempt.trouble.failures)
            doubted |= attempt.strangers
            self.lessons.add(Lessons(doubted, attempt.needed, lost, sending, failed))
        holdings = self._holdings
        if holdings.results is not None:
            if committed and holdings.digest is not None and self._late is None:
                self._service.keep(self._attempts[-1].group.group_id, holdings)
            else:
                holdings.drop(range(len(self._plan.parts)))
                holdings.results.release()
        self._attempts.clear()
        self._mine = None
        del self._tensors, self._base, self._holdings


def _checked_inputs(
    tensors: Sequence[torch.Tensor],
    weight: float,
    base: Sequence[torch.Tensor] | None = None,
    samples: float | None = None,
) -> Inputs:
    """Tensors that cannot be averaged are kept out of everyone's average from the start: their weight is zero."""
    inputs, wrong = Inputs(tensors, weight, base, samples), ""
    if weight > 0:
        finite = all(map(all_finite, inputs.each()))
        wrong = beyond_sums(inputs.each(), weight) if finite else "NaN or infinity"
    if wrong:
        inputs.weight, inputs.samples, inputs.note = 0.0, None, f"its tensors hold {wrong}"
    return inputs


def contributions(
    group: Group, averages: Sequence[Average], options: AllreduceOptions
) -> tuple[dict[PeerID, float], dict[PeerID, float], dict[PeerID, str]]:
    """The weights and the samples of the members, as far as their tensors arrived, and how much did of members that are
    only in some parts. Samples are bounded here as reducers bound weights: by what all members hold, so that all count
    the same."""
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


def conclude(own: bytes | None, decision: Decision | None, members: Sequence[bytes] = ()) -> None:
    """The consequence of a decision for one member.

        committed, and own digest equal     apply
        committed, otherwise                undecided: the group has a result that did not come here in time
        again                               undecided: there is no try left
        aborted                             failed: no member applies anything
        unknown                             undecided: inputs are kept

    All members that know the decision know the same one. So no two members apply different results, and none takes a
    round for failed that another one applies.

    Returns if a member that holds the result with digest `own` (None: not all of it) is to apply it.

    Raises RoundFailed if the group gave the round up, naming the suspects among `members`, and RoundUndecided if
    this member cannot follow the group.
    """
    match decision:
        case None:
            raise RoundUndecided("no quorum of the group is in reach, and nobody who knows the outcome")
        case Again():
            raise RoundUndecided("the group tries again more often than it should")
        case Aborted(reason, suspects):
            raise RoundFailed(reason, [members[suspect] for suspect in suspects if suspect < len(members)])
        case Committed(digest) if own is None:
            raise RoundUndecided(f"the group committed the result {digest.hex()[:8]}, which is not all here")
        case Committed(digest) if own != digest:
            raise RoundUndecided(f"the group committed another result than the one that is here ({digest.hex()[:8]})")
