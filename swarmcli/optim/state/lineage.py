"""Which parameters a peer holds, as a chain of hashes, and which chain to follow when chains part.

`lineage = hash(previous lineage, id of the committed round, epoch, samples)`; the first is the hash of the run's
initial parameters. So a lineage fixes its epoch, and nobody can show what its rounds signed as that of another one.
Peers of one lineage hold the same parameters, up to rounding, so only they average with each other.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

LINEAGE_BYTES = 32
MAX_COUNT = 1 << 47  # most epochs or samples that a peer may claim: reports hold twice that, so counts can still grow
ANY_ROUND = b"swarm any round"  # in place of a round's id, where a lineage only counts epochs


def hash_tensors(tensors: Iterable[torch.Tensor], *prefix: bytes) -> bytes:
    """SHA-256 over the prefix fields and each tensor's dtype, shape and bytes, in order."""
    digest = hashlib.sha256()
    for field in prefix:
        digest.update(len(field).to_bytes(8, "big") + field)
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().contiguous().reshape(-1).cpu()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()


def is_count(*numbers: int) -> bool:
    """Whether all numbers can be a run's epochs or samples."""
    return all(0 <= number <= MAX_COUNT for number in numbers)


def first_lineage(run_id: str, parameters: Sequence[torch.Tensor]) -> bytes:
    """The lineage of a run in which nobody has stepped yet: equal for peers that start from equal parameters."""
    return hash_tensors(parameters, b"swarm first lineage", run_id.encode())


def lineage_of_resumed(run_id: str, lineage: bytes) -> bytes:
    """The lineage of a run that begins from another one's state: equal for peers that begin from the same lineage."""
    return hashlib.sha256(b"swarm resumed" + lineage + run_id.encode()).digest()


def next_lineage(lineage: bytes, round_id: bytes, epoch: int, samples: int) -> bytes:
    """The lineage after the round `round_id` on `lineage`, which led to `epoch` epochs and `samples` samples in all."""
    counts = epoch.to_bytes(8, "big") + samples.to_bytes(8, "big")
    return hashlib.sha256(b"swarm lineage 2" + lineage + counts + round_id).digest()


def solitary_round_id(peer_id: bytes, lineage: bytes) -> bytes:
    """In place of a group's id, for a peer that steps alone."""
    return hashlib.sha256(b"swarm alone" + peer_id + lineage).digest()


@dataclass(frozen=True, slots=True)
class LineagePosition:
    """How far a lineage has come. Members of one lineage agree on all three values."""

    epoch: int
    samples: int  # of all peers, in all epochs so far
    lineage: bytes

    def after(self, round_id: bytes, samples: int) -> LineagePosition:
        """The position after the round `round_id`, of `samples` samples, at this one."""
        total = min(self.samples + samples, MAX_COUNT)  # a member may claim any number
        epoch = self.epoch + 1
        return LineagePosition(epoch, total, next_lineage(self.lineage, round_id, epoch, total))

    def is_after(self, lineage: bytes, round_id: bytes) -> bool:
        """Whether this round on this lineage led to this position."""
        return self.lineage == next_lineage(lineage, round_id, self.epoch, self.samples)

    def by_epoch(self, target_batch_size: int) -> LineagePosition:
        """One epoch later, if peers differ by design (several groups): the lineage names no round, so it only says from
        where the run began and how many epochs ago."""
        return self.after(ANY_ROUND, target_batch_size)

    def astray(self, peer_id: bytes) -> LineagePosition:
        """The position of a peer that came here with other parameters than everyone else. The others' beat it."""
        lineage = hashlib.sha256(b"swarm astray" + peer_id + self.lineage).digest()
        return LineagePosition(self.epoch, max(0, self.samples - 1), lineage)

    def beats(self, other: LineagePosition) -> bool:
        """The rule for lineages that have parted: the higher epoch, then more samples, then the smaller hash."""
        return self.order > other.order

    @property
    def order(self) -> tuple[int, int, int]:
        """Greater for the position that beats the other."""
        return self.epoch, self.samples, -int.from_bytes(self.lineage, "big")


# The position of parameters that are partly another state's, since a download could not be read to its end, or that
# never were the run's. Every other position beats it.
TORN = LineagePosition(0, 0, b"\xff" * LINEAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Claim:
    """A position that a peer says it holds. `settled`: it has decided to train on it."""

    position: LineagePosition
    settled: bool = True


def best(positions: Iterable[LineagePosition]) -> LineagePosition | None:
    """The position that beats all others; None if there is none."""
    return max(positions, key=lambda position: position.order, default=None)


def lineage_to_follow(own: Claim, others: Iterable[Claim]) -> LineagePosition:
    """The position on which this peer should train; its own, unless another claim is better.

    A settled peer yields only to a settled position that beats its own. A newcomer also yields to a settled one that is
    just as far (giving up its own initial weights loses nothing). Among newcomers alone the rule for lineages decides,
    so all of them choose the same one.
    """
    claims = list(others)
    settled = best(claim.position for claim in claims if claim.settled)
    if own.settled:
        return settled if settled is not None and settled.beats(own.position) else own.position
    if settled is not None:
        behind = (settled.epoch, settled.samples) < (own.position.epoch, own.position.samples)
        return own.position if behind else settled
    return best([own.position, *(claim.position for claim in claims)]) or own.position


class PositionHistory:
    """The latest positions of one peer's lineage, and since when (swarm time) it had each.

    Reports of others are seconds old, which may be some epochs: they are compared with this peer's position at that
    time.
    """

    def __init__(self) -> None:
        self._positions: deque[tuple[float, LineagePosition]] = deque(maxlen=1024)

    def note(self, position: LineagePosition, now: float, *, anew: bool = False) -> None:
        """This peer has come to `position`. `anew`: by another lineage than before, so earlier positions are
        forgotten."""
        if anew:
            self._positions.clear()
        if not self._positions or self._positions[-1][1] != position:
            self._positions.append((now, position))

    @property
    def latest(self) -> LineagePosition | None:
        """The present position; None before the first."""
        return self._positions[-1][1] if self._positions else None

    def at(self, moment: float) -> LineagePosition | None:
        """This peer's position at a moment (swarm time), or the earliest that is remembered; None: there is none."""
        for since, position in reversed(self._positions):
            if since <= moment:
                return position
        return self._positions[0][1] if self._positions else None

    def trail(self, position: LineagePosition, most: int) -> tuple[bytes, ...]:
        """The latest lineages before `position`, at most `most`, oldest first."""
        before = [each.lineage for _, each in list(self._positions)[-most - 1 :] if each != position]
        return tuple(before[-most:])

    def __contains__(self, position: LineagePosition) -> bool:
        return any(position == each for _, each in self._positions)

    def differs(self, position: LineagePosition) -> bool:
        """Whether this peer was at the same epoch on another lineage."""
        return any(position.epoch == each.epoch and position.lineage != each.lineage for _, each in self._positions)
