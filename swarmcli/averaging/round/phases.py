"""One round of several all-reduces among the same members, with one outcome.

    group ─▶ derived group 0 ─▶ derived group 1 ─▶ …     ids are hashes of the group's and the number of the step
              all-reduce         all-reduce
              averages ────────▶ inputs, averages ────▶ results

Every step has one outcome for all of its members, and changes nothing but memory of this round. Tensors change when
the last step has committed. If some step is given up, all members know, and the round has failed for all of them;
a member that loses sight of a step is undecided about the round, while a majority may go on.

A member whose tensors are in the results takes the same part in every step. If a sender is missing from some part of
some step, or names another weight than before, the round fails. All members find the same senders in the committed
averages, so it fails for all of them, and they try again with another group. An auxiliary holds no averages and cannot
tell how the round goes on: it asks the others.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, ParamSpec, Protocol, TypeVar

import msgspec
import torch

from swarmcli.averaging.config import MAX_WEIGHT, MIN_WEIGHT, AllreduceOptions
from swarmcli.averaging.consensus.certificate import RoundCertificate
from swarmcli.averaging.consensus.messages import MAX_WORDS, GroupID, Index, Words
from swarmcli.averaging.consensus.presence import GroupCalls
from swarmcli.averaging.group import MAX_MEMBERS, Group
from swarmcli.averaging.round.allreduce import Allreduce, AllreduceResult
from swarmcli.averaging.round.pace import Lessons
from swarmcli.averaging.round.service import AllreduceService
from swarmcli.compression import CompressionInfo, TensorDescriptor
from swarmcli.errors import CallRefused, NetworkError, RoundFailed, RoundUndecided
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.recent import Recent
from swarmcli.tasks import Bell, forgetful, on_all_processors

MOST_STEPS = 9  # all-reduces of one round, after which it is given up
_REMEMBERED = 16  # rounds that auxiliaries may ask about

P = ParamSpec("P")
T = TypeVar("T")


class ProgramRun(Protocol):
    """One try at a program. It changes nothing but its own memory."""

    def inputs(self, phase: int) -> list[torch.Tensor]:
        """This member's tensors for a phase, in the shapes of the tensors that the phase averages."""

    def take(self, phase: int, averages: Sequence[torch.Tensor]) -> int | None:
        """The averages of a phase, read-only. Returns the phase that comes next; None: that was the last.

        The answer is the same for all members: it depends on averages, the seed, and tensors that all hold alike.
        """

    def results(self) -> list[torch.Tensor]:
        """The new values of the averager's tensors, in their order, after the last phase."""


class RoundProgram(Protocol):
    """How the tensors of an averager are averaged in several phases."""

    @property
    def description(self) -> str:
        """Equal for all members of a group; at most 200 characters."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that a phase works through: long work does not belong on the event loop."""

    @property
    def phases(self) -> Sequence[Sequence[int]]:
        """The averager's tensors that each phase averages, by index. None is empty; a round begins with phase 0."""

    def begin(self, seed: bytes) -> ProgramRun:
        """A try from the beginning. `seed` is equal for all members, and no other round has it."""


def run_alone(program: RoundProgram, seed: bytes) -> list[torch.Tensor]:
    """The results of a round without other members."""
    run, phase = program.begin(seed), 0
    while True:
        following = run.take(phase, run.inputs(phase))
        if following is None:
            return run.results()
        phase = following


class StepQuestion(msgspec.Struct, frozen=True):
    """Asks how the round of this group goes on after so many steps."""

    group_id: GroupID
    steps: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)]


class StepAnswer(msgspec.Struct, frozen=True):
    """It goes on with a phase; or it has failed; or it is over, and members by index have these weights in the end, and
    samples (none: as many as they weigh)."""

    phase: Annotated[int, msgspec.Meta(ge=0)] | None = None
    failed: Words = ""
    weights: Annotated[dict[Index, float], msgspec.Meta(max_length=MAX_MEMBERS)] = {}
    samples: Annotated[dict[Index, float], msgspec.Meta(max_length=MAX_MEMBERS)] = {}


class PhaseNews:
    """How the phased rounds of one averager go on after each step: trainers know it from the averages and tell it,
    auxiliaries ask for it."""

    def __init__(self, service: AllreduceService) -> None:
        self._service = service
        self._method = service.method("step")
        self._rounds: Recent[bytes, _Round] = Recent(_REMEMBERED)
        self._bell = Bell()

    def start(self) -> None:
        """Begins to answer. Raises ValueError if the endpoint has another one of this prefix."""
        self._service.endpoint.serve(self._method, StepQuestion, self._answer)

    def close(self) -> None:
        """Answers nobody any more. Idempotent."""
        self._service.endpoint.withdraw(self._method)
        for round_ in self._rounds.values():
            round_.over = True
        self._rounds.clear()
        self._bell.ring()

    @contextmanager
    def telling(self, group: Group) -> Iterator[Callable[[StepAnswer], None]]:
        """While the block runs, auxiliaries that ask about this round wait for the next answer. Yields a function that
        tells the answer for one step more."""
        round_ = self._rounds[group.group_id] = _Round(group)

        def tell(answer: StepAnswer) -> None:
            round_.answers.append(answer)
            self._bell.ring()

        try:
            yield tell
        finally:
            round_.over = True
            self._bell.ring()

    async def ask(self, group: Group, steps: int) -> StepAnswer:
        """The answer of the leader, or of the first member that knows. Raises RoundUndecided if none does."""
        mates = GroupCalls(self._service.endpoint, self._service.method, group)
        for member in mates.others:
            if member not in mates.group.auxiliaries:
                try:
                    return await mates.ask(member, "step", StepQuestion(group.group_id, steps), StepAnswer)
                except NetworkError:
                    continue  # it has left the round, or is out of reach: another one may know
        raise RoundUndecided("nobody in reach knows how the round goes on")

    async def _answer(self, peer: PeerID, question: StepQuestion) -> StepAnswer:
        round_ = self._rounds.get(question.group_id)
        if round_ is None or peer not in round_.group:
            raise CallRefused("unknown", "this round is not known here")
        while len(round_.answers) < question.steps:
            if round_.over:
                raise CallRefused("over", "this member has left the round")
            await self._bell.wait()
        return round_.answers[question.steps - 1]


@dataclass
class _Round:
    """This member's answers about one round."""

    group: Group
    answers: list[StepAnswer] = field(default_factory=list)  # after each step
    over: bool = False  # there will be no more


class PhasedAllreduce:
    """A round of several phases at one member, in the place of an Allreduce. Made and run once."""

    def __init__(
        self,
        service: AllreduceService,
        news: PhaseNews,
        group: Group,
        tensors: Sequence[torch.Tensor],
        program: RoundProgram,
        *,
        weight: float,
        options: AllreduceOptions,
        samples: float | None = None,
    ) -> None:
        """`tensors` tell shapes and types; the averaged values come from the program. For the rest see Allreduce."""
        self.group = group
        self._service, self._news, self._program = service, news, program
        self._tensors, self._weight, self._options, self._samples = list(tensors), weight, options, samples
        self._me = service.endpoint.peer_id
        self._steps = [group.derived(f"step {number}") for number in range(MOST_STEPS)]
        self.lessons = Lessons()  # known once `run` has ended, however it ended
        self._done: list[AllreduceResult] = []
        self._deadline = loop_time() + (options.allreduce_timeout or math.inf)

    async def run(self) -> AllreduceResult:
        """Takes part until the outcome is known. Raises RoundFailed or RoundUndecided, as Allreduce does."""
        with ExitStack() as stack:
            # Members that are at a step before this one hear that it will come.
            stack.enter_context(self._service.expecting(*self._steps))
            try:
                if self.group.members[self.group.index_of(self._me)].auxiliary:
                    return await self._assist()
                return await self._take_part(stack.enter_context(self._news.telling(self.group)))
            except (RoundUndecided, asyncio.CancelledError):
                self._service.leave(*self._steps[len(self._done) + 1 :])
                raise

    @forgetful
    async def _take_part(self, tell: Callable[[StepAnswer], None]) -> AllreduceResult:
        run = await self._compute(self._program.begin, self.group.group_id)
        weights: Mapping[PeerID, float] | None = None
        phase: int | None = 0
        while phase is not None:
            result = await self._step(phase, await self._compute(run.inputs, phase))
            weights = result.weights if weights is None else weights
            if unlike := self._unlike(result, weights):
                names = ", ".join(peer.short for peer in unlike)
                failed = f"{names} had not the same part in all phases: {next(iter(unlike.values()))}"[:MAX_WORDS]
                tell(StepAnswer(failed=failed))
                raise RoundFailed(failed, list(unlike))
            if not weights:
                return self._over(tell, [], {})
            phase = await self._compute(run.take, phase, result.averages)
            if phase is not None:
                tell(StepAnswer(phase))
        return self._over(tell, await self._compute(run.results), weights or {})

    async def _assist(self) -> AllreduceResult:
        """Takes part as an auxiliary."""
        phase: int | None = 0
        while phase is not None:
            await self._step(phase, [self._tensors[index] for index in self._program.phases[phase]])
            answer = await self._news.ask(self.group, len(self._done))
            if answer.failed:
                raise RoundFailed(answer.failed)
            phase = answer.phase
            if phase is not None and phase >= len(self._program.phases):
                raise RoundUndecided(f"a member says that phase {phase} follows; there is none")
        named = [*answer.weights.items(), *answer.samples.items()]
        if not all(i < len(self.group) and MIN_WEIGHT <= w <= MAX_WEIGHT for i, w in named):
            raise RoundUndecided("a member names impossible weights")
        weights, samples = (
            {self.group.members[index].peer_id: each for index, each in told.items()}
            for told in (answer.weights, {i: answer.samples.get(i, w) for i, w in answer.weights.items()})
        )
        return self._composed([], weights, samples)

    async def _step(self, phase: int, inputs: Sequence[torch.Tensor]) -> AllreduceResult:
        number = len(self._done)
        if number == MOST_STEPS:
            raise RoundFailed(f"{MOST_STEPS} steps were not enough")  # for everyone, who all count them
        step = Allreduce(
            self._service,
            self._steps[number],
            inputs,
            weight=self._weight,
            options=self._options_of(phase),
            step=number,
            samples=self._samples,
        )
        try:
            self._done.append(await step.run())
        finally:
            self.lessons.add(step.lessons)
        return self._done[-1]

    def _options_of(self, phase: int) -> AllreduceOptions:
        """The options of one step: codecs may choose by the tensors' own keys, and the time left is for this step."""
        infos = self._options.tensor_infos or [
            CompressionInfo(TensorDescriptor.of(tensor), index) for index, tensor in enumerate(self._tensors)
        ]
        left = max(self._deadline - loop_time(), 0.001)  # past the deadline, the leader gives the step up
        return replace(
            self._options,
            tensor_infos=tuple(infos[index] for index in self._program.phases[phase]),
            allreduce_timeout=left if math.isfinite(left) else None,
        )

    async def _compute(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await on_all_processors(self._program.nbytes, work, *args, **kwargs)

    def _unlike(self, result: AllreduceResult, weights: Mapping[PeerID, float]) -> dict[PeerID, str]:
        """Member whose part in a step is not the one that it had in the first → why."""
        named = result.weights
        senders = {self.group.members[index].peer_id for part in result.parts for index in part.senders}
        return {
            peer: result.left_out.get(peer, "it had unlike parts in two phases")
            for peer in sorted(senders | weights.keys())
            if peer in result.left_out or named.get(peer) != weights.get(peer)
        }

    # The end

    def _over(
        self, tell: Callable[[StepAnswer], None], results: list[torch.Tensor], weights: Mapping[PeerID, float]
    ) -> AllreduceResult:
        samples = self._done[-1].samples if weights else {}
        told = [{self.group.index_of(peer): each for peer, each in named.items()} for named in (weights, samples)]
        tell(StepAnswer(weights=told[0], samples=told[1] if samples != weights else {}))
        return self._composed(results, weights, samples)

    def _composed(
        self, results: list[torch.Tensor], weights: Mapping[PeerID, float], samples: Mapping[PeerID, float]
    ) -> AllreduceResult:
        """All steps as one result. Its digest and parts are those of the last step, which depends on all before it."""
        left_out: dict[PeerID, str] = {}
        for result in self._done:
            left_out = {**result.left_out, **left_out}
        return AllreduceResult(
            averages=results,
            contributors=tuple(weights),
            weights=weights,
            samples=samples,
            left_out={peer: reason for peer, reason in left_out.items() if peer not in weights},
            digest=self._done[-1].digest,
            bytes_sent=sum(result.bytes_sent for result in self._done),
            bytes_received=sum(result.bytes_received for result in self._done),
            parts=self._done[-1].parts,
            late=any(result.late for result in self._done),
            certificate=self._certificate(),
        )

    def _certificate(self) -> RoundCertificate | None:
        """The certificate of the last step, under the id of the round."""
        last, number = self._done[-1].certificate, len(self._done) - 1
        if last is None:
            return None
        return msgspec.structs.replace(last, nonce=self.group.nonce, derivations=(f"step {number}", *last.derivations))
