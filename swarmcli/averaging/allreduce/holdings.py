"""The averages that one member holds, as it makes them out to the others and gives them away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarmcli.averaging.agreement.ballot_messages import DIGEST_BYTES
from swarmcli.averaging.allreduce.layout import Plan
from swarmcli.averaging.allreduce.messages import MAX_PARTS
from swarmcli.averaging.allreduce.reducer import Average, plain
from swarmcli.averaging.allreduce.results import digest_of_parts
from swarmcli.averaging.allreduce.vector import Results
from swarmcli.compression import NoCompression, TensorMessage

NOTHING = bytes(DIGEST_BYTES)  # stands for the digest of a part that is not there


class Holdings:
    """What one member has of the result of a round. An auxiliary has only the parts that it reduced."""

    def __init__(self, plan: Plan, results: Results | None) -> None:
        """`results` is where the averages lie; None: an auxiliary."""
        self.plan, self._results = plan, results
        self._averages: dict[int, Average] = {}

    def put(self, averages: Iterable[Average]) -> None:
        """These are here now, in the place of others of the same parts."""
        for average in averages:
            self._averages[average.part.index] = average

    def drop(self, parts: Iterable[int]) -> None:
        """The memory of these is about to be written."""
        for index in parts:
            self._averages.pop(index, None)

    def get(self, index: int) -> Average | None:
        return self._averages.get(index)

    @property
    def averages(self) -> Sequence[Average]:
        """In the order of the parts."""
        return [self._averages[index] for index in sorted(self._averages)]

    @property
    def missing(self) -> list[int]:
        return [part.index for part in self.plan.parts if part.index not in self._averages]

    @property
    def digest(self) -> bytes | None:
        """Of the whole result. None if it is not all here, or if it is none: some parts with nobody's tensors."""
        if len(self._averages) < len(self.plan.parts):
            return None
        if len({bool(average.senders) for average in self._averages.values()}) > 1:
            return None
        return digest_of_parts(b"".join(average.digest for average in self.averages))

    @property
    def digests(self) -> bytes:
        """Of all parts, one behind the other; empty for a plan of more parts than fit into a message."""
        if len(self.plan.parts) > MAX_PARTS:
            return b""
        held = self._averages
        return b"".join(held[part.index].digest if part.index in held else NOTHING for part in self.plan.parts)

    def content(self, index: int) -> TensorMessage | None:
        """A held average, decoded; None if nobody's tensors are in it."""
        average = self._averages[index]
        if not average.senders:
            return None
        if self._results is not None:
            return NoCompression().compress(self._results.part(average.part))
        return None if average.message is None else plain(average.part.codec, average.message)
