"""The averages that one member holds, as it makes them out to the others and gives them away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from swarmcli.averaging.round.layout import Part, Plan
from swarmcli.averaging.round.messages import DIGEST_BYTES, MAX_PARTS
from swarmcli.averaging.round.reducer import Average, plain
from swarmcli.averaging.round.results import digest_of_parts
from swarmcli.averaging.round.vector import Results
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

    def lacking(self, target: bytes) -> dict[Part, bytes]:
        """The parts of which another average is here than `target` names (32 bytes for each part, zeros for one that
        does not matter), or none, with its digest."""
        wanted = {part: digest_at(target, part.index) for part in self.plan.parts}
        return {part: digest for part, digest in wanted.items() if digest not in (NOTHING, self._digest_of(part))}

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
        return b"".join(map(self._digest_of, self.plan.parts))

    def _digest_of(self, part: Part) -> bytes:
        return self._averages[part.index].digest if part.index in self._averages else NOTHING

    def content(self, index: int) -> TensorMessage | None:
        """A held average, decoded; None if nobody's tensors are in it."""
        average = self._averages[index]
        if not average.senders:
            return None
        if self._results is not None:
            return NoCompression().compress(self._results.part(average.part))
        return None if average.message is None else plain(average.part.codec, average.message)


def digest_at(digests: bytes, part: int) -> bytes:
    """Of one part in a table; NOTHING also where the table is too short."""
    return digests[part * DIGEST_BYTES : (part + 1) * DIGEST_BYTES] or NOTHING


def common_digests(tables: Sequence[bytes], parts: int) -> bytes:
    """For each part the digest that most hold (honest reducers give everyone the same), or zeros if nobody does.

    Tables of another length tell nothing. Empty for a plan of more parts than fit into a message.
    """
    tables, common = [table for table in tables if len(table) == parts * DIGEST_BYTES], bytearray()
    for part in range(parts):
        counts = Counter(digest for table in tables if (digest := digest_at(table, part)) != NOTHING)
        common += min(counts, key=lambda digest: (-counts[digest], digest), default=NOTHING)
    return bytes(common) if parts <= MAX_PARTS else b""


def unless_missing(held: bytes, before: bytes, tables: Sequence[bytes]) -> bytes:
    """`held` with zeros for parts that were to be copied `before` and are not in all tables."""
    kept = bytearray(held)
    for part in range(len(held) // DIGEST_BYTES):
        digest = digest_at(held, part)
        if digest == digest_at(before, part) and any(digest_at(table, part) != digest for table in tables):
            kept[part * DIGEST_BYTES : (part + 1) * DIGEST_BYTES] = NOTHING
    return bytes(kept)
