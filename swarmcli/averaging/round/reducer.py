"""The parts that one member reduces: what senders deliver, the sums, and the averages. No network in here.

Sums are in float32 (float64 for float64 tensors), and lie in the memory of the average if that has the same type. All
members get the encoded average, this one too, so all hold the same bits.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import Lock

import torch

from swarmcli.averaging.aggregators.base import FREE_WEIGHT, Aggregator, PartAggregator, sum_type
from swarmcli.averaging.aggregators.mean import Mean
from swarmcli.averaging.audit.signed import digest_of
from swarmcli.averaging.config import MAX_WEIGHT, MIN_WEIGHT
from swarmcli.averaging.round.buffers import Average, Inputs, Results, plain
from swarmcli.averaging.round.plan import Part, Plan
from swarmcli.averaging.weights import WeightBounds, limits
from swarmcli.compression import TensorMessage
from swarmcli.compression.base import all_finite
from swarmcli.concurrency import Bell, forgetful, on_executor
from swarmcli.errors import CompressionError, InputRefused, RoundFailed


@dataclass(slots=True)
class _Sender:
    weight: float | None = None  # None until it has named one
    samples: float | None = None  # None: equal to the weight
    counts: float | None = None  # how much of the weight counts; None until that is known
    delivered: int = 0  # parts, which arrive in order, so their number says which
    left_out: str | None = None  # why

    def settled(self, position: int) -> bool:
        """Whether nothing more can come from it for this part."""
        return self.left_out is not None or self.weight == 0 or self.delivered > position


class Reducer:
    """Adds up what the senders deliver, part by part in order, and yields each part's average when all are in."""

    def __init__(
        self,
        plan: Plan,
        me: int,
        senders: Iterable[int],
        inputs: Inputs | None,
        results: Results | None,
        aggregator: Aggregator = Mean(),  # noqa: B008  # it has no state
        bounds: WeightBounds = WeightBounds(),  # noqa: B008  # a frozen value
        note_inputs: Callable[[Part, Mapping[int, float]], bytes] | None = None,
    ) -> None:
        """`me`: this member's index. `senders`: member indices, this one too if it sends. `inputs` and `results`: None
        for an auxiliary. `bounds`: how much of the weights counts. `note_inputs`: in audited runs, gets the members in
        a part with their weights, in the order of members, and returns the hash to sign."""
        self.most_beside = 64 << 20  # bytes of sums that have memory of their own; beyond it quick senders wait
        self.parts = plan.by_reducer.get(me, ())
        self._inputs, self._results, self._me, self._aggregator = inputs, results, me, aggregator
        self._bounds, self._note_inputs = bounds, note_inputs
        self._senders = {sender: _Sender() for sender in senders}
        self._sums: dict[int, PartAggregator] = {}
        self._beside, self._counting = 0, Lock()  # bytes of such sums; a lock, since threads add parts
        self._outvoted: dict[int, str] = {}  # sender → why it left itself out, or the aggregator left out a part of it
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._averages: list[Average] = []
        self._failure: str | None = None
        self._bell = Bell()  # of all that changes the sums
        self._formed = Bell()  # one more average is there: tasks that wait for one sleep through additions

    @property
    def left_out(self) -> dict[int, str]:
        """Member index → why its tensors are missing from some part on."""
        lost = {index: sender.left_out for index, sender in self._senders.items() if sender.left_out is not None}
        return self._outvoted | lost

    def begin(self, sender: int, weight: float, samples: float | None = None, note: str = "") -> None:
        """A sender names its weight, and its samples if they are another number. With weight zero it delivers nothing,
        and `note` may say why. Raises InputRefused for impossible numbers, and the second time."""
        if weight != 0 and not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise InputRefused(f"its weight is {weight}; expected 0, or {MIN_WEIGHT} to {MAX_WEIGHT}")
        if samples is not None and not MIN_WEIGHT <= samples <= MAX_WEIGHT:
            raise InputRefused(f"it has {samples} samples; expected {MIN_WEIGHT} to {MAX_WEIGHT}")
        if self._senders[sender].weight is not None:
            raise InputRefused("it began twice")
        self._senders[sender].weight, self._senders[sender].samples = weight, samples
        if note:
            self._outvoted[sender] = note
        self._weigh()
        if sender == self._me:
            self._senders[sender].delivered = len(self.parts)
        self._bell.ring()

    @forgetful
    async def add(self, sender: int, message: TensorMessage) -> None:
        """Adds the next part of a sender; returns when the memory of `message` may be used again.

        Raises InputRefused if the part cannot be averaged; then nothing of it is in the sum. A sender far ahead of the
        others waits here, if sums need memory of their own.
        """
        state = self._senders[sender]
        position = state.delivered
        if not state.weight or position >= len(self.parts):
            raise InputRefused("it sent a part that the plan does not provide for")
        while state.counts is None:  # it has named a large weight: how much of it counts depends on the others' weights
            await self._wait()
        # The next part to be averaged may always come in: otherwise the slowest sender could wait here for ever.
        while position > len(self._averages) and self._beside >= self.most_beside:
            await self._wait()
        async with self._locks[position]:  # two senders may deliver this part at the same time, in two threads
            if self._failure is not None:  # since this sender waited; now its part would begin another sum
                raise RoundFailed(self._failure)
            if state.left_out is not None:
                raise InputRefused(f"it was left out before: {state.left_out}")
            try:
                await on_executor(self.parts[position].descriptor.nbytes, self._add, position, sender, message)
            finally:
                self._bell.ring()

    def has_all_of(self, sender: int) -> bool:
        """Whether the reducer expects nothing more from a sender."""
        return self._senders[sender].settled(len(self.parts) - 1)

    def leave_out(self, sender: int, reason: str) -> None:
        """The reducer expects nothing more from a sender. Parts that it has delivered count. The first reason stays."""
        state = self._senders[sender]
        if not self.has_all_of(sender):
            state.left_out = reason
            self._weigh()
            self._bell.ring()

    def abort(self, reason: str) -> None:
        """Ends the work and lets go of all sums and averages: tasks that wait here get RoundFailed."""
        if self._failure is None:
            self._failure = reason
            self._sums.clear()
            self._averages.clear()
            self._bell.ring()
            self._formed.ring()

    async def close(self, reason: str) -> None:
        """Aborts, and returns once no sum is being written any more."""
        self.abort(reason)
        for lock in list(self._locks.values()):
            async with lock:
                pass

    async def average(self, position: int) -> Average:
        """Waits for the average of `parts[position]`. Raises RoundFailed if the work was aborted."""
        while len(self._averages) <= position:
            await self._wait(self._formed)
        return self._averages[position]

    @forgetful
    async def run(self) -> None:
        """Forms the averages in order. If one cannot be represented, raises RoundFailed, also in tasks that wait."""
        try:
            for position in range(len(self.parts)):
                # A settled sender stays settled: once this loop ends, nobody adds to this part but who holds its lock.
                while not all(sender.settled(position) for sender in self._senders.values()):
                    await self._wait()
                async with self._locks[position]:  # a sender that was left out may still be adding
                    held = self._sums[position].nbytes if position in self._sums else 0
                    nbytes = self._aggregator.passes * (held + self.parts[position].descriptor.nbytes)
                    average = await on_executor(nbytes, self._finish, position)
                del self._locks[position]
                self._averages.append(average)
                self._bell.ring()  # senders that are far ahead may go on
                self._formed.ring()
        except RoundFailed as error:
            self.abort(error.reason)
            raise

    def _weigh(self) -> None:
        """Settles how much of the senders' weights counts, after a sender has named its own or was left out. All
        reducers come to the same figures: they hear the same weights, in whatever order."""
        named = {sender: state.weight for sender, state in self._senders.items() if state.weight is not None}
        missing = sum(state.weight is None and state.left_out is None for state in self._senders.values())
        most = limits(named, self._bounds.ramps, self._bounds.max_share, missing)
        for sender, weight in named.items():
            state = self._senders[sender]
            if state.counts is None and (not missing or weight <= most.get(sender, math.inf)):
                state.counts = min(weight, most.get(sender, math.inf))

    async def _wait(self, bell: Bell | None = None) -> None:
        if self._failure is not None:
            raise RoundFailed(self._failure)
        await (bell or self._bell).wait()

    def _in_place(self, part: Part) -> bool:
        return self._results is not None and part.segment.dtype is sum_type(part.segment.dtype)

    def _add(self, position: int, sender: int, message: TensorMessage) -> None:
        part, state = self.parts[position], self._senders[sender]
        try:
            if message.header.descriptor() != part.descriptor:
                raise InputRefused(f"part {part.index} has another shape or type than planned")
            values = part.codec.extract(message)
        except CompressionError as error:
            raise InputRefused(f"part {part.index} cannot be decoded: {error}") from error
        if not all_finite(values):
            raise InputRefused(f"part {part.index} holds NaN or infinity")
        if reason := beyond_sums([values], state.weight or 0.0):
            raise InputRefused(f"part {part.index} holds {reason}")
        self._add_up(position, values, state.counts or 0.0, sender, lasting=False)
        # Counted here and not after the await: the part is in the sum, even if the caller has been cancelled meanwhile.
        state.delivered += 1

    def _add_up(self, position: int, values: torch.Tensor, weight: float, sender: int, *, lasting: bool) -> None:
        """Adds values to a part's sum, which lies where the average will, if that has the type of sums."""
        before = 0
        if position in self._sums:
            before = self._sums[position].nbytes
        else:
            part = self.parts[position]
            if self._results is not None and self._in_place(part):
                memory = self._results.part(part)
            else:
                memory = torch.empty(part.descriptor.numel, dtype=sum_type(part.segment.dtype))
                before = -memory.nbytes
            self._sums[position] = self._aggregator.part(
                memory, len(self._senders), ordered=self._note_inputs is not None
            )
        self._sums[position].add(values, weight, sender, lasting=lasting)
        with self._counting:
            self._beside += self._sums[position].nbytes - before

    def _finish(self, position: int) -> Average:
        part = self.parts[position]
        own = self._senders.get(self._me)
        if own is not None and own.weight and self._inputs is not None:
            self._add_up(position, self._inputs.part(part), own.counts or own.weight, self._me, lasting=True)
        included = {
            index: sender.counts
            for index, sender in sorted(self._senders.items())
            if sender.counts and sender.delivered > position
        }
        message = None
        inputs = b"" if self._note_inputs is None else self._note_inputs(part, included)
        if included:
            values, left_out = self._average(position)
            included = {index: weight for index, weight in included.items() if index not in left_out}
            self._outvoted = {**left_out, **self._outvoted}
            message = self._encode(part, values)
        senders, weights = tuple(included), tuple(included.values())
        if any(self._senders[sender].samples is not None for sender in senders):
            told = [(self._senders[sender].samples, self._senders[sender].weight) for sender in senders]
            weights += tuple(samples or weight or 0.0 for samples, weight in told)
        decoded = None if self._results is None else self._results.part(part)
        content = None if message is None else plain(part.average_codec, message, decoded)
        return Average(part, senders, weights, message, digest_of(part.index, senders, weights, content), inputs)

    def _average(self, position: int) -> tuple[torch.Tensor, dict[int, str]]:
        """The aggregator's average of a part, and the senders that it left out."""
        aggregator, part = self._sums.pop(position), self.parts[position]
        with self._counting:
            self._beside -= aggregator.nbytes
            if not (self._results is not None and self._in_place(part)):
                self._beside -= part.descriptor.numel * sum_type(part.segment.dtype).itemsize
        values, left_out = aggregator.finish()
        return values, {sender: f"part {part.index}: {reason}" for sender, reason in left_out.items()}

    def _encode(self, part: Part, average: torch.Tensor) -> TensorMessage:
        codec = part.average_codec
        message = codec.compress(average.to(part.segment.dtype))
        if self._results is not None and not all_finite(codec.extract(message, out=self._results.part(part))):
            raise RoundFailed(f"the average of part {part.index} is beyond the range of codec {codec.name}")
        return message


def beyond_sums(values: Iterable[torch.Tensor], weight: float) -> str:
    """Why finite values, with this weight, are too large for a sum with those of others; "" if they are not.

    The answer depends on nothing of the others, so all members come to the same one: the sender is at fault, whomever
    it meets.
    """
    if weight <= FREE_WEIGHT:
        return ""
    for tensor in values:
        largest = tensor.abs().max().item() if tensor.numel() else 0.0
        if largest > torch.finfo(sum_type(tensor.dtype)).max * (FREE_WEIGHT / weight):
            return f"values up to {largest:.3g} with the weight {weight:.3g}, which would overflow a sum"
    return ""
