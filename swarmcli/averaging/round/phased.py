"""One round of several all-reduces among the same members, with one outcome.

    group ─▶ derived group 0 ─▶ derived group 1 ─▶ …     ids are hashes of the group's and the number of the step
              all-reduce         all-reduce
              averages ────────▶ inputs, averages ────▶ results

Every step has one outcome for all of its members, and changes nothing but memory of this round. Tensors change when
the last step has committed. If some step is given up, all members know, and the round has failed for all of them;
a member that loses sight of a step is undecided about the round, while a majority may go on.

Whoever has a part in the results has the same part in every step. If a sender is missing from some part of some step,
or comes with another weight than before, the round fails. All members find the same senders in what was committed, so
it fails for all of them, and they try again with another group. An auxiliary holds no averages and cannot tell how it
goes on: it asks (`desk.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import ParamSpec, TypeVar

import torch

from swarmcli.averaging.config import MAX_WEIGHT, MIN_WEIGHT, AllreduceOptions
from swarmcli.averaging.group import Group
from swarmcli.averaging.round.allreduce import Allreduce
from swarmcli.averaging.round.desk import MOST_STEPS, RoundNews, StepAnswer, StepDesk
from swarmcli.averaging.round.messages import MAX_WORDS
from swarmcli.averaging.round.program import RoundProgram
from swarmcli.averaging.round.results import AllreduceResult, contributions
from swarmcli.averaging.round.service import AllreduceService
from swarmcli.compression import CompressionInfo, TensorDescriptor
from swarmcli.errors import RoundFailed, RoundUndecided
from swarmcli.network.identity import PeerID
from swarmcli.tasks import forgetful, on_all_processors

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
        self._steps = [group.derived(f"step {number}") for number in range(MOST_STEPS)]
        self._done: list[AllreduceResult] = []
        self._deadline = _now() + (options.allreduce_timeout or math.inf)

    async def run(self) -> AllreduceResult:
        """Takes part until the outcome is known. Raises RoundFailed or RoundUndecided, as Allreduce does."""
        with ExitStack() as stack:
            # Whoever is at a step before this member hears that it will come.
            stack.enter_context(self._service.expecting(*self._steps))
            try:
                if self._group.members[self._group.index_of(self._me)].auxiliary:
                    return await self._assist()
                return await self._take_part(stack.enter_context(self._desk.telling(self._group)))
            except (RoundUndecided, asyncio.CancelledError):
                self._service.part(*self._steps[len(self._done) + 1 :])
                raise

    @forgetful
    async def _take_part(self, news: RoundNews) -> AllreduceResult:
        run = await self._compute(self._program.begin, self._group.group_id)
        weights: Mapping[PeerID, float] | None = None
        phase: int | None = 0
        while phase is not None:
            result = await self._step(phase, await self._compute(run.inputs, phase))
            weights = result.weights if weights is None else weights
            if unlike := self._unlike(result, weights):
                names = ", ".join(peer.short for peer in unlike)
                failed = f"{names} had not the same part in all phases: {next(iter(unlike.values()))}"[:MAX_WORDS]
                self._desk.tell(news, StepAnswer(failed=failed))
                raise RoundFailed(failed, list(unlike))
            if not weights:
                return self._over(news, [], {})
            phase = await self._compute(run.take, phase, result.averages)
            if phase is not None:
                self._desk.tell(news, StepAnswer(phase))
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
        step = Allreduce(
            self._service,
            self._steps[number],
            inputs,
            weight=self._weight,
            options=self._options_of(phase),
            step=number,
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

    def _unlike(self, result: AllreduceResult, weights: Mapping[PeerID, float]) -> dict[PeerID, str]:
        """Whose part in a step is not the one that it had in the first, and why."""
        named, _ = contributions(self._group, result.parts)
        senders = {self._group.members[index].peer_id for part in result.parts for index in part.senders}
        return {
            peer: result.left_out.get(peer, "it had unlike parts in two phases")
            for peer in sorted(senders | weights.keys())
            if peer not in named or named[peer] != weights.get(peer)
        }

    # The end

    def _over(self, news: RoundNews, results: list[torch.Tensor], weights: Mapping[PeerID, float]) -> AllreduceResult:
        by_index = {self._group.index_of(peer): weight for peer, weight in weights.items()}
        self._desk.tell(news, StepAnswer(weights=by_index))
        return self._composed(results, weights)

    def _composed(self, results: list[torch.Tensor], weights: Mapping[PeerID, float]) -> AllreduceResult:
        """All steps as one result. Its digest and parts are those of the last, since it stands on all before it."""
        left_out: dict[PeerID, str] = {}
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
            late=any(result.late for result in self._done),
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
