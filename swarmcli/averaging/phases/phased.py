"""One round of several all-reduces among the same members, with one outcome.

    group ─▶ derived group 0 ─▶ derived group 1 ─▶ …     ids are hashes of the group's and the number of the step
              all-reduce         all-reduce
              averages ────────▶ inputs, averages ────▶ results

Every step has one outcome for all of its members, and changes nothing but memory of this round. Tensors change when
the last step has committed. If some step is given up, all members know, and the round has failed for all of them;
a member that loses sight of a step is undecided about the round, while a majority may go on.

Whoever has a part in the results has the same part in every step. A sender that is missing from some part of some step,
or comes with another weight than before, counts as if it had brought nothing at all: the program begins again without
it, in further steps of the same group. All members find the same senders in what was committed, and so begin again
together. An auxiliary holds no averages and cannot tell how it goes on: it asks (`desk.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import ParamSpec, TypeVar

import torch

from swarmcli.averaging.allreduce.allreduce import Allreduce
from swarmcli.averaging.allreduce.patience import AllreduceOptions
from swarmcli.averaging.allreduce.reducer import MAX_WEIGHT, MIN_WEIGHT, Average
from swarmcli.averaging.allreduce.results import AllreduceResult, contributions
from swarmcli.averaging.allreduce.service import AllreduceService
from swarmcli.averaging.group import NONCE_BYTES, Group
from swarmcli.averaging.phases.desk import MOST_STEPS, RoundNews, StepAnswer, StepDesk
from swarmcli.averaging.phases.program import RoundProgram
from swarmcli.averaging.tasks import forgetful, on_all_processors
from swarmcli.compression import CompressionInfo, TensorDescriptor
from swarmcli.errors import RoundFailed, RoundUndecided
from swarmcli.network.identity import PeerID

_LEAST_TIME = 0.001  # seconds for a step that begins past the deadline: its leader gives it up

P = ParamSpec("P")
T = TypeVar("T")


class PhasedAllreduce:
    """Such a round at one member, in the place of an Allreduce. Made and run once."""

    def __init__(
        self,
        service: AllreduceService,
        desk: StepDesk,
        group: Group,
        tensors: Sequence[torch.Tensor],
        program: RoundProgram,
        *,
        weight: float,
        options: AllreduceOptions,
    ) -> None:
        """`tensors` tell shapes and types; what is averaged comes from the program. For the rest see Allreduce."""
        self._service, self._desk, self._group, self._program = service, desk, group, program
        self._tensors, self._weight, self._options = list(tensors), weight, options
        self._me = service.endpoint.peer_id
        self._steps = [derived(group, number) for number in range(MOST_STEPS)]
        self._done: list[AllreduceResult] = []
        self._excluded: dict[PeerID, str] = {}  # why their tensors do not count
        self._deadline = _now() + (options.allreduce_timeout or math.inf)

    async def run(self) -> AllreduceResult:
        """Takes part until the outcome is known. Raises RoundFailed or RoundUndecided, as Allreduce does."""
        with ExitStack() as stack:
            for group in self._steps:  # whoever is at a step before this member hears that it will come
                stack.enter_context(self._service.expecting(group))
            try:
                if self._group.members[self._group.index_of(self._me)].auxiliary:
                    return await self._assist()
                return await self._take_part(stack.enter_context(self._desk.telling(self._group)))
            except (RoundUndecided, asyncio.CancelledError):
                for group in self._steps[len(self._done) + 1 :]:
                    self._service.part(group)
                raise

    @forgetful
    async def _take_part(self, news: RoundNews) -> AllreduceResult:
        while True:
            weights: Mapping[PeerID, float] | None = None
            run = await self._compute(self._program.begin, self._group.group_id)
            phase: int | None = 0
            while phase is not None:
                result = await self._step(phase, await self._compute(run.inputs, phase))
                weights = result.weights if weights is None else weights
                unlike = self._unlike(result, weights)
                if unlike:
                    self._begin_again(news, unlike)
                    break
                if not weights:
                    return self._over(news, [], {})
                phase = await self._compute(run.take, phase, result.averages)
                if phase is not None:
                    self._desk.tell(news, StepAnswer(phase))
            else:
                return self._over(news, await self._compute(run.results), weights or {})

    async def _assist(self) -> AllreduceResult:
        """As an auxiliary."""
        phase: int | None = 0
        while phase is not None:
            await self._step(phase, [self._tensors[index] for index in self._program.phases[phase]])
            answer = await self._desk.ask(self._group, len(self._done))
            if answer.failed:
                raise RoundFailed(answer.failed)
            phase = answer.phase
            if phase is not None and phase >= len(self._program.phases):
                raise RoundUndecided(f"a member says that phase {phase} follows; there is none")
        if not all(i < len(self._group) and MIN_WEIGHT <= w <= MAX_WEIGHT for i, w in answer.weights.items()):
            raise RoundUndecided("a member names impossible weights")
        return self._composed([], {self._group.members[i].peer_id: w for i, w in answer.weights.items()})

    async def _step(self, phase: int, inputs: Sequence[torch.Tensor]) -> AllreduceResult:
        number = len(self._done)
        if number == MOST_STEPS:
            raise RoundFailed(f"{MOST_STEPS} steps were not enough")  # for everyone, who all count them
        weight = 0.0 if self._me in self._excluded else self._weight
        step = Allreduce(
            self._service, self._steps[number], inputs, weight=weight, options=self._options_of(phase), step=number
        )
        self._done.append(await step.run())
        return self._done[-1]

    def _options_of(self, phase: int) -> AllreduceOptions:
        """Codecs may choose by the tensors' own keys; what is left of the time is for this step."""
        infos = self._options.tensor_infos or [
            CompressionInfo(TensorDescriptor.of(tensor), index) for index, tensor in enumerate(self._tensors)
        ]
        left = max(self._deadline - _now(), _LEAST_TIME)
        return replace(
            self._options,
            tensor_infos=tuple(infos[index] for index in self._program.phases[phase]),
            allreduce_timeout=left if math.isfinite(left) else None,
        )

    async def _compute(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await on_all_processors(self._program.nbytes, work, *args, **kwargs)

    # Who counts

    def _unlike(self, result: AllreduceResult, weights: Mapping[PeerID, float]) -> dict[PeerID, str]:
        """Whose part in a step is not the one that it had in the first, or who has one and was to have none."""
        named, unlike = contributions(self._group, result.parts)
        for peer in sorted(named.keys() | weights.keys()):
            if peer in self._excluded and peer in named:
                unlike[peer] = "it goes on sending though it was left out"
            elif named.get(peer) != weights.get(peer) and peer not in unlike:
                unlike[peer] = result.left_out.get(peer, "it had unlike parts in two phases")
        if unlike and unlike.keys() >= named.keys():
            for peer in self._best_attended(result.parts, unlike):
                del unlike[peer]
        return unlike

    def _best_attended(self, parts: Sequence[Average], among: Mapping[PeerID, str]) -> list[PeerID]:
        """Where nobody is in all parts, who is in most of them: one reducer that hears nobody must not cost everybody.

        Not all of `among`, or nothing would be gained.
        """
        attended = Counter(self._group.members[index].peer_id for part in parts for index in part.senders)
        able = [m.peer_id for m in self._group.members if m.peer_id in among and m.peer_id not in self._excluded]
        most = max((attended[peer] for peer in able), default=0)
        best = [peer for peer in able if most and attended[peer] == most]
        return best if len(best) < len(among) else best[:1] if len(among) > 1 else []

    def _begin_again(self, news: RoundNews, unlike: Mapping[PeerID, str]) -> None:
        """Without these. Raises RoundFailed where that does not help any more."""
        reason = ""
        if unlike.keys() <= self._excluded.keys():
            reason = "members go on sending though they were left out"
        elif len(self._done) + len(self._program.phases) > MOST_STEPS:
            reason = f"in {len(self._done)} steps somebody was lost again and again"
        if reason:
            self._desk.tell(news, StepAnswer(failed=reason))
            raise RoundFailed(reason, sorted(unlike))
        self._excluded = {**unlike, **self._excluded}
        self._desk.tell(news, StepAnswer(0))

    # The end

    def _over(self, news: RoundNews, results: list[torch.Tensor], weights: Mapping[PeerID, float]) -> AllreduceResult:
        by_index = {self._group.index_of(peer): weight for peer, weight in weights.items()}
        self._desk.tell(news, StepAnswer(weights=by_index))
        return self._composed(results, weights)

    def _composed(self, results: list[torch.Tensor], weights: Mapping[PeerID, float]) -> AllreduceResult:
        """All steps as one result. Its digest and parts are those of the last, since it stands on all before it."""
        left_out = dict(self._excluded)
        for result in self._done:
            left_out = {**result.left_out, **left_out}
        return AllreduceResult(
            averages=results,
            contributors=tuple(weights),
            weights=weights,
            left_out={peer: reason for peer, reason in left_out.items() if peer not in weights},
            digest=self._done[-1].digest,
            bytes_sent=sum(result.bytes_sent for result in self._done),
            bytes_received=sum(result.bytes_received for result in self._done),
            parts=self._done[-1].parts,
            deputies=tuple(dict.fromkeys(deputy for result in self._done for deputy in result.deputies)),
            late=any(result.late for result in self._done),
        )


def derived(group: Group, step: int) -> Group:
    """The group of a step: the same members and shares under an id of its own."""
    nonce = hashlib.sha256(b"swarm step" + group.group_id + step.to_bytes(4, "big")).digest()[:NONCE_BYTES]
    return Group(replace(group.body, nonce=nonce))


def _now() -> float:
    return asyncio.get_running_loop().time()
