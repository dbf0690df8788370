"""A member's side of its stream with one reducer: parts go out, averages come in, both at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarmcli.averaging.config import MAX_WEIGHT, MIN_WEIGHT, AllreduceOptions
from swarmcli.averaging.round.layout import Part, Plan
from swarmcli.averaging.round.messages import AverageHeader, Farewell, PartHeader, SenderTerms
from swarmcli.averaging.round.reducer import Average
from swarmcli.averaging.round.vector import Inputs, Results
from swarmcli.compression import NoCompression, TensorMessage
from swarmcli.compression.base import all_finite, tensor_memory
from swarmcli.errors import CompressionError, NetworkError, ProtocolViolation
from swarmcli.network import Stream
from swarmcli.tasks import beside, forgetful, on_executor, unless_silent


@dataclass(frozen=True)
class Contribution:
    """What a member brings: its tensors and their weight, or zero with a note why."""

    inputs: Inputs
    weight: float
    note: str = ""


@dataclass
class FromReducer:
    """What one reducer gave: the averages of its parts in order, and whom it left out."""

    averages: list[Average] = field(default_factory=list)
    left_out: dict[int, str] = field(default_factory=dict)


class PartSender:
    """Exchanges with reducers on behalf of one member; results land in memory that they all share."""

    def __init__(
        self, plan: Plan, senders: Sequence[int], mine: Contribution, results: Results, options: AllreduceOptions
    ) -> None:
        """`senders`: indices of all members whose tensors may be in an average."""
        self._plan, self._mine, self._results, self._options = plan, mine, results, options
        self._senders = frozenset(senders)

    @forgetful
    async def exchange(self, reducer: int, stream: Stream, got: FromReducer) -> None:
        """Sends this member's parts and receives into `got` all averages of one reducer.

        Raises NetworkError (ProtocolViolation among them) and TimeoutError when the reducer fails.
        """
        parts = self._plan.by_reducer[reducer]
        async with beside(self._send(parts, stream)):
            await self._receive(parts, stream, got)

    @forgetful
    async def _send(self, parts: Sequence[Part], stream: Stream) -> None:
        mine = self._mine
        try:
            await stream.send(SenderTerms(self._plan.fingerprint, mine.weight, mine.note))
            for part in parts if mine.weight > 0 else ():
                message = await on_executor(part.descriptor.nbytes, self._encode, part)
                await stream.send(PartHeader(message.header), message.payload)
        except NetworkError:
            return  # what it means for the round shows in what comes back: a reducer may also just want no more

    def _encode(self, part: Part) -> TensorMessage:
        return part.codec.compress(self._mine.inputs.part(part))

    async def _receive(self, parts: Sequence[Part], stream: Stream, got: FromReducer) -> None:
        for part in parts:
            async with unless_silent(stream, self._options.for_reducer):
                header, payload = await stream.receive(AverageHeader, self._memory_for(part))
            self._check(header)
            message = None if header.tensor is None else TensorMessage(header.tensor, (payload,))
            if message is not None:
                await on_executor(part.descriptor.nbytes, self._decode, part, message)
            got.averages.append(Average(part, header.senders, header.weights, None, header.digest))
        async with unless_silent(stream, self._options.for_reducer):
            farewell, _ = await stream.receive(Farewell)
        got.left_out.update(farewell.left_out)

    def _memory_for(self, part: Part) -> Callable[[AverageHeader, int], memoryview]:
        """Where the payload of an average goes: where it belongs at once, if it needs no decoding."""

        def into(header: AverageHeader, size: int) -> memoryview:
            if header.tensor is None or size > part.payload_bound:
                raise ProtocolViolation(f"the average of part {part.index} has {size} bytes")
            if isinstance(part.codec, NoCompression) and size == part.descriptor.nbytes:
                return tensor_memory(self._results.part(part))
            return memoryview(bytearray(size))

        return into

    def _decode(self, part: Part, message: TensorMessage) -> None:
        try:
            values = part.codec.extract(message, out=self._results.part(part))
        except CompressionError as error:
            raise ProtocolViolation(f"the average of part {part.index} cannot be decoded: {error}") from error
        if not all_finite(values):  # now, while it lies in the processor's cache
            raise ProtocolViolation(f"the average of part {part.index} holds NaN or infinity")

    def _check(self, header: AverageHeader) -> None:
        check_senders(header.senders, header.weights, self._senders)
        if (header.tensor is None) != (not header.senders):
            raise ProtocolViolation("an average that does not fit the senders it names")


def check_senders(senders: Sequence[int], weights: Sequence[float], allowed: frozenset[int]) -> None:
    """Raises ProtocolViolation if an average cannot be of these members."""
    if len(senders) != len(weights):
        raise ProtocolViolation("an average that does not fit the senders it names")
    if list(senders) != sorted(set(senders)) or not allowed.issuperset(senders):
        raise ProtocolViolation("an average of members who have no tensors in this group")
    if not all(MIN_WEIGHT <= weight <= MAX_WEIGHT for weight in weights):
        raise ProtocolViolation("an average with impossible weights")
