"""Which parameters a peer holds, as a chain of hashes, and which chain to follow where they part.

`lineage = hash(previous lineage, id of the committed round)`; the first is the hash of the run's initial parameters.
Peers of one lineage hold the same parameters (to rounding), so only they average with each other.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

LINEAGE_BYTES = 32
MAX_COUNT = 1 << 47  # epochs or samples that a peer may claim; half of what reports hold, so that none can be passed
_ANY_ROUND = b"swarm any round"


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
    """Whether all can be a run's epochs or samples. What comes from others and cannot is no standing."""
    return all(0 <= number <= MAX_COUNT for number in numbers)


def first_lineage(run_id: str, parameters: Sequence[torch.Tensor]) -> bytes:
    """Of a run that nobody has stepped yet: equal for peers that start from equal parameters."""
    return hash_tensors(parameters, b"swarm first lineage", run_id.encode())


def next_lineage(lineage: bytes, round_id: bytes) -> bytes:
    """After the round `round_id` was committed on `lineage`."""
    return hashlib.sha256(b"swarm lineage" + lineage + round_id).digest()


def solitary_round_id(peer_id: bytes, lineage: bytes) -> bytes:
    """Stands in for a group's id when a peer that is alone steps by itself."""
    return hashlib.sha256(b"swarm alone" + peer_id + lineage).digest()


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a lineage has come. Members of one lineage agree on all three values."""

    epoch: int
    samples: int  # in all epochs so far, by everyone
    lineage: bytes

    def after(self, round_id: bytes, samples: int) -> Standing:
        """Once the round `round_id` with so many samples was committed on it."""
        total = min(self.samples + samples, MAX_COUNT)  # a member may say that it had as many as there are numbers
        return Standing(self.epoch + 1, total, next_lineage(self.lineage, round_id))

    def by_epoch(self, target_batch_size: int) -> Standing:
        """One epoch later, where peers differ by design (local updates, several groups): no round names the lineage,
        so it says no more than from where the run started and how many epochs ago."""
        return self.after(_ANY_ROUND, target_batch_size)

    def astray(self, peer_id: bytes) -> Standing:
        """Of a peer that has come to this standing with other parameters than everyone else: all of theirs beat it."""
        lineage = hashlib.sha256(b"swarm astray" + peer_id + self.lineage).digest()
        return Standing(self.epoch, max(0, self.samples - 1), lineage)

    def beats(self, other: Standing) -> bool:
        """The rule for lineages that parted: higher epoch, then more samples, then the smaller id."""
        return self.order > other.order

    @property
    def order(self) -> tuple[int, int, int]:
        """Greater for the standing that beats the other."""
        return self.epoch, self.samples, -int.from_bytes(self.lineage, "big")


# Of parameters that are partly another state's, since a download could not be read to its end: every other beats it.
TORN = Standing(0, 0, b"\xff" * LINEAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Claim:
    """A standing that a peer says it holds; `settled` once it has decided to train on it."""

    standing: Standing
    settled: bool = True


def best(standings: Iterable[Standing]) -> Standing | None:
    """The one that beats all others; None if there is none."""
    return max(standings, key=lambda standing: standing.order, default=None)


def lineage_to_follow(own: Claim, others: Iterable[Claim]) -> Standing:
    """The standing that this peer should train on, its own if no other has a better claim to it.

    A settled peer yields only to a settled lineage that beats its own. A newcomer also yields to a settled lineage
    that is just as far (its unlike initial weights lose nothing); among newcomers only, the rule for lineages decides,
    so that all of them name the same one.
    """
    claims = list(others)
    settled = best(claim.standing for claim in claims if claim.settled)
    if own.settled:
        return settled if settled is not None and settled.beats(own.standing) else own.standing
    if settled is not None:
        behind = (settled.epoch, settled.samples) < (own.standing.epoch, own.standing.samples)
        return own.standing if behind else settled
    return best([own.standing, *(claim.standing for claim in claims)]) or own.standing


class History:
    """The latest standings of one peer's lineage, and since when (swarm time) it had each.

    Reports of others are seconds old, which may be some epochs: they are compared with where this peer stood then.
    """

    def __init__(self, most: int = 1024) -> None:
        self._standings: deque[tuple[float, Standing]] = deque(maxlen=most)

    def note(self, standing: Standing, now: float, *, anew: bool = False) -> None:
        """This peer has come to `standing`; `anew`: from another lineage than those before."""
        if anew:
            self._standings.clear()
        if not self._standings or self._standings[-1][1] != standing:
            self._standings.append((now, standing))

    def at(self, moment: float) -> Standing | None:
        """Where this peer stood then, or at the earliest moment that is remembered; None: nothing is."""
        for since, standing in reversed(self._standings):
            if since <= moment:
                return standing
        return self._standings[0][1] if self._standings else None

    def __contains__(self, standing: Standing) -> bool:
        return any(standing == each for _, each in self._standings)

    def differs(self, standing: Standing) -> bool:
        """Whether this peer was at the same epoch on another lineage."""
        return any(standing.epoch == each.epoch and standing.lineage != each.lineage for _, each in self._standings)
