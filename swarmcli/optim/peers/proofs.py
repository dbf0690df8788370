"""What proves where a lineage came from: its last epochs, with the certificates of the rounds that ended them.

    lineage a ── round, signed by A B C D ──▶ b ── stepped alone ──▶ c ── round, signed by C D E F ──▶ d

Each step names what the hash of the next lineage is made of, so nobody can leave one out or count epochs differently.
Who knows A and B believes b; and if enough of those who signed there have signed d too, whoever else signed it, then d.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from swarmcli.averaging.consensus.certificate import RoundCertificate
from swarmcli.errors import SwarmError
from swarmcli.network import wire
from swarmcli.network.identity import PeerID
from swarmcli.optim.peers.standing import MOST_ROUNDS, Signed, enough
from swarmcli.optim.state.lineage import (
    ANY_ROUND,
    LINEAGE_BYTES,
    MAX_COUNT,
    LineagePosition,
    next_lineage,
    solitary_round_id,
)

MOST_STEPS = 64  # a peer that stood still while a round had no outcome, or was cut off, misses some dozens
MOST_BYTES = 128 << 10  # of all steps of one proof; groups of hundreds show fewer of them
_Hash = Annotated[bytes, msgspec.Meta(min_length=LINEAGE_BYTES, max_length=LINEAGE_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]


class Step(msgspec.Struct, frozen=True):
    """One epoch. `epoch` and `samples` are those of the position that it led to; `round_id` is `ANY_ROUND` where the
    lineage only counts epochs. `certificate` is of a round on the lineage `before`; None: the peer stepped by itself.
    """

    before: _Hash
    round_id: Annotated[bytes, msgspec.Meta(max_length=LINEAGE_BYTES)]
    epoch: _Count
    samples: _Count
    certificate: RoundCertificate | None = None

    @property
    def position(self) -> LineagePosition:
        """Where it led."""
        return LineagePosition(
            self.epoch, self.samples, next_lineage(self.before, self.round_id, self.epoch, self.samples)
        )

    @property
    def fits(self) -> bool:
        """Whether the certificate, if there is one, is of this step."""
        if self.certificate is None:
            return True
        same = self.round_id in (ANY_ROUND, self.certificate.group_id)
        return same and self.certificate.tag == self.before


class Proof(msgspec.Struct, frozen=True):
    """The last steps to a position, oldest first; and, if there is one, the owner's signature for it and a state."""

    steps: Annotated[tuple[Step, ...], msgspec.Meta(max_length=MOST_STEPS)] = ()
    owners_state: bytes = b""
    owners_signature: bytes = b""

    def leads_to(self, position: LineagePosition) -> bool:
        """Whether each step follows from the one before, and the last one leads there. Hashes a little."""
        if not self.steps or not all(step.fits for step in self.steps):
            return False
        positions = [step.position for step in self.steps]
        epochs = [each.epoch for each in positions]
        befores = [step.before for step in self.steps[1:]]
        joined = befores == [each.lineage for each in positions[:-1]]
        return joined and epochs == list(range(epochs[0], epochs[0] + len(epochs))) and positions[-1] == position

    def signed(self, known: Collection[PeerID], needed: int, holders: Collection[PeerID] = ()) -> Signed:
        """Who of those `known` bears the last step out; nobody if it is not signed, or not by enough.

        Enough are `needed` of those known or, step by step, more than a third of a round that has been borne out (as
        light clients follow a chain whose validators change). Signatures are checked only where enough of the signers
        are such members. To be called off the loop: each takes a tenth of a millisecond.

        A step that a peer made by itself nobody signs. It counts as signed by that peer if it is one of `holders`, who
        say over their own connections that they hold where the steps lead.
        """
        trusted, bearing, members = [(frozenset(known), needed)], frozenset[PeerID](), frozenset[PeerID]()
        alone = False
        for step in self.steps:
            members, certificate = frozenset(), step.certificate
            if certificate is None:
                lone = {peer for peer in holders if step.round_id == solitary_round_id(peer, step.before)}
                if bearing and any(len(lone & group) >= least for group, least in trusted):
                    members, alone = bearing, True
                continue
            if any(index >= len(certificate.peers) for index in certificate.votes.signatures):
                continue
            signers = certificate.signers
            if any(len(signers & group) >= least for group, least in trusted) and certificate.verify():
                trusted.append((signers, enough(len(certificate.peers))))
                bearing |= signers & trusted[0][0]
                members = bearing
        return Signed(members, frozenset(step.before for step in self.steps), alone)


class Way:
    """The last steps of this peer's own lineage, which it shows to others. Bounded."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=MOST_STEPS)

    def note(self, step: Step) -> None:
        """The next epoch; one that does not follow from the last begins a new row."""
        if self._steps and self._steps[-1].position.lineage != step.before:
            self._steps.clear()
        self._steps.append(step)

    def take_over(self, proof: Proof) -> None:
        """Of a lineage that was downloaded."""
        self._steps.clear()
        self._steps.extend(proof.steps)

    def proof(self, lineage: bytes) -> Proof:
        """Of this lineage, as many of its last steps as have room; without any if it is not on this peer's way."""
        steps: list[Step] = []
        room, found = MOST_BYTES, False
        for step in reversed(self._steps):
            found = found or step.position.lineage == lineage
            if found:
                room -= len(wire.encode(step))
                if room < 0:
                    break
                steps.append(step)
        return Proof(tuple(reversed(steps)))

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)


def step_between(
    before: LineagePosition, after: LineagePosition, round_id: bytes, certificate: RoundCertificate | None
) -> Step | None:
    """The step from one position to the next by this round; None if it is another way that led there."""
    for named in (round_id, ANY_ROUND):
        step = Step(before.lineage, named, after.epoch, after.samples, certificate)
        if after.epoch == before.epoch + 1 and step.position == after:
            return step if step.fits else msgspec.structs.replace(step, certificate=None)
    return None


@dataclass(frozen=True)
class Saved:
    """What goes into a checkpoint, so that a peer that comes back knows its mates and can prove where it stands."""

    rounds: tuple[tuple[PeerID, ...], ...] = ()
    proof: Proof = field(default_factory=Proof)

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "rounds": [[peer.text for peer in mates] for mates in self.rounds],
            "proof": wire.encode(self.proof).hex(),
        }

    @classmethod
    def read(cls, value: Any) -> Saved:
        """Of a checkpoint without it, nothing. Raises ValueError for what is none."""
        if value is None:
            return cls()
        try:
            rounds = tuple(tuple(map(PeerID.parse, mates)) for mates in value["rounds"][-MOST_ROUNDS:])
            return cls(rounds, wire.decode(Proof, bytes.fromhex(value["proof"])))
        except (TypeError, KeyError, ValueError, SwarmError, msgspec.DecodeError) as error:
            raise ValueError(f"standing: not what a checkpoint says of a peer's mates and proofs: {error}") from None
