"""Proofs of how a lineage came about: its last epochs, with the certificates of the rounds that ended them.

    lineage a ── round, signed by A B C D ──▶ b ── stepped alone ──▶ c ── round, signed by C D E F ──▶ d

Each step names what the hash of the next lineage is made of, so nobody can leave one out or count epochs differently.
A peer that knows A and B believes b. If enough of those who have signed there have signed d too, whoever else has, it
also believes d.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeAlias

import msgspec

from swarmcli.averaging.certificate import RoundCertificate
from swarmcli.errors import NetworkError, SwarmError
from swarmcli.network import wire
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import offload
from swarmcli.optim.peers.report import PeerReport
from swarmcli.optim.state.lineage import (
    ANY_ROUND,
    LINEAGE_BYTES,
    MAX_COUNT,
    LineagePosition,
    next_lineage,
)

MOST_ROUNDS = 16  # the last rounds, no two with the same members, whose members are mates
MOST_MATES = 512  # of one round
MOST_STEPS = 64  # in a proof: a peer that stood still while a round had no outcome, or was cut off, misses some dozens
ANSWER_TIMEOUT = 3.0  # seconds
MOST_PROOFS = 4  # that this peer asks for at once; to check one takes a few hundred signatures at most
MOST_SIGNED = 256  # lineages whose signers this peer remembers
SignedByOwner: TypeAlias = Callable[[LineagePosition, bytes, bytes], bool]  # position, hash of a state, signature
logger = logging.getLogger(__name__)
_Hash = Annotated[bytes, msgspec.Meta(min_length=LINEAGE_BYTES, max_length=LINEAGE_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]


class Step(msgspec.Struct, frozen=True):
    """One epoch of a lineage.

    before       the lineage before it
    round_id     of the round that ended it; `ANY_ROUND` if the lineage only counts epochs
    epoch        of the position to which it led, as is `samples`
    certificate  of the round; None: the peer stepped alone, or has no certificate
    """

    before: _Hash
    round_id: Annotated[bytes, msgspec.Meta(max_length=LINEAGE_BYTES)]
    epoch: _Count
    samples: _Count
    certificate: RoundCertificate | None = None

    @property
    def position(self) -> LineagePosition:
        """The position to which it led."""
        return LineagePosition(
            self.epoch, self.samples, next_lineage(self.before, self.round_id, self.epoch, self.samples)
        )

    @property
    def fits(self) -> bool:
        """Whether the certificate, if there is one, belongs to this step."""
        if self.certificate is None:
            return True
        same = self.round_id in (ANY_ROUND, self.certificate.group_id)
        return same and self.certificate.tag == self.before


@dataclass(frozen=True, slots=True)
class Signed:
    """The signers of the rounds that led to a lineage, and the lineages on the way there."""

    members: frozenset[PeerID] = frozenset()
    way: frozenset[bytes] = frozenset()


def enough(members: int) -> int:
    """How many of a round's members cannot all be hostile: more than a third of four or more, or one of fewer."""
    return (members - 1) // 3 + 1 if members >= 4 else 1


class Mates:
    """The members of this peer's last rounds, without itself. Bounded."""

    def __init__(self) -> None:
        self.rounds: deque[frozenset[PeerID]] = deque(maxlen=MOST_ROUNDS)  # all different, the latest last

    def note(self, members: Iterable[PeerID]) -> None:
        """A round of this peer and these members has committed; of nobody else, if it stepped alone."""
        mates = frozenset(sorted(members)[:MOST_MATES])
        if mates in self.rounds:
            self.rounds.remove(mates)
        self.rounds.append(mates)

    @property
    def known(self) -> frozenset[PeerID]:
        return frozenset().union(*self.rounds)

    @property
    def needed(self) -> int:
        """How many mates must bear out a lineage: one more than can be hostile in the last round."""
        return enough(1 + len(self.rounds[-1])) if self.rounds else 1

    def __bool__(self) -> bool:
        """Whether this peer has been in a round."""
        return bool(self.rounds)


class LineageProof(msgspec.Struct, frozen=True):
    """The last steps to a position, oldest first."""

    steps: Annotated[tuple[Step, ...], msgspec.Meta(max_length=MOST_STEPS)] = ()

    def leads_to(self, position: LineagePosition) -> bool:
        """Whether each step follows from the one before, and the last one leads to this position."""
        if not self.steps or not all(step.fits for step in self.steps):
            return False
        positions = [step.position for step in self.steps]
        epochs = [each.epoch for each in positions]
        befores = [step.before for step in self.steps[1:]]
        joined = befores == [each.lineage for each in positions[:-1]]
        return joined and epochs == list(range(epochs[0], epochs[0] + len(epochs))) and positions[-1] == position

    def shows(self) -> LineagePosition | None:
        """The position to which its steps lead, if they follow from each other and the members of each round, whoever
        they are, have signed it; else None. Not for the event loop, as `signed`."""
        if not self.steps or not self.leads_to(self.steps[-1].position):
            return None
        rounds = [step.certificate for step in self.steps if step.certificate is not None]
        return self.steps[-1].position if all(_names_signers(each) and each.verify() for each in rounds) else None

    def signed(self, known: Collection[PeerID], needed: int) -> Signed:
        """Finds those of the `known` peers that bear out the last step: nobody if not enough have signed it, or nobody
        has, since a peer made it alone.

        `needed` of the known ones are enough or, step by step, more than a third of a round that has been borne out (as
        light clients follow a chain whose validators change). Signatures are checked only if enough of the signers are
        such members. Not for the event loop: each signature takes a tenth of a millisecond.
        """
        trusted, bearing, members = [(frozenset(known), needed)], frozenset[PeerID](), frozenset[PeerID]()
        for step in self.steps:
            members, certificate = frozenset(), step.certificate
            if certificate is None or not _names_signers(certificate):
                continue
            signers = certificate.signers
            if any(len(signers & group) >= least for group, least in trusted) and certificate.verify():
                trusted.append((signers, enough(len(certificate.peers))))
                members = bearing = bearing | (signers & trusted[0][0])
        return Signed(members, frozenset(step.before for step in self.steps))


def _names_signers(certificate: RoundCertificate) -> bool:
    return all(index < len(certificate.peers) for index in certificate.votes)


def weekday(moment: float) -> str:
    """A swarm time in words, for waits of hours or days: Sat 14:05."""
    return time.strftime("%a %H:%M", time.localtime(moment))


@dataclass(frozen=True)
class Heard:
    """What this peer has been shown of how far the run is: by another peer, or by its own home."""

    epoch: int
    by: str  # in words
    at: float  # swarm time
    proof: LineageProof = field(default_factory=LineageProof)  # with it this peer convinces others

    @property
    def sentence(self) -> str:
        return f"{self.by} showed on {weekday(self.at)} that this run is at epoch {self.epoch}"


class LineageWay:
    """The last steps of this peer's own lineage, which it shows to others. Bounded."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=MOST_STEPS)

    def note(self, step: Step) -> None:
        """Adds the next step; if it does not follow from the last one, it replaces all."""
        if self._steps and self._steps[-1].position.lineage != step.before:
            self._steps.clear()
        self._steps.append(step)

    def take_over(self, proof: LineageProof) -> None:
        """This peer has downloaded the lineage to which these steps lead."""
        self._steps.clear()
        self._steps.extend(proof.steps)

    def proof(self, lineage: bytes) -> LineageProof:
        """Returns as many of the last steps to this lineage as a message has room for; none if it is not on this peer's
        way."""
        steps: list[Step] = []
        room, found = 128 << 10, False  # bytes; of groups of hundreds fewer steps have room
        for step in reversed(self._steps):
            found = found or step.position.lineage == lineage
            if found:
                room -= len(wire.encode(step))
                if room < 0:
                    break
                steps.append(step)
        return LineageProof(tuple(reversed(steps)))

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)


def step_between(
    before: LineagePosition, after: LineagePosition, round_id: bytes, certificate: RoundCertificate | None
) -> Step | None:
    """The step from one position to the next by this round; None if the round does not lead there."""
    for named in (round_id, ANY_ROUND):
        step = Step(before.lineage, named, after.epoch, after.samples, certificate)
        if after.epoch == before.epoch + 1 and step.position == after:
            return step if step.fits else msgspec.structs.replace(step, certificate=None)
    return None


class Saved(msgspec.Struct, frozen=True):
    """What a checkpoint keeps, so that a peer that comes back knows its mates and can prove its position."""

    rounds: Annotated[tuple[tuple[PeerID, ...], ...], msgspec.Meta(max_length=MOST_ROUNDS)] = ()
    proof: LineageProof = LineageProof()

    def plain(self) -> str:
        """As hexadecimal digits, for JSON."""
        return wire.encode(self).hex()

    @classmethod
    def read(cls, value: Any) -> Saved:
        """Reads it from a checkpoint; of one without it, or of an earlier version, it is empty. Raises ValueError for
        anything else."""
        if not isinstance(value, str):
            return cls()
        try:
            return wire.decode(cls, bytes.fromhex(value))
        except (ValueError, SwarmError, msgspec.DecodeError) as error:
            raise ValueError(f"standing: not what a checkpoint says of a peer's mates and proofs: {error}") from None


def method_of(run_id: str) -> str:
    """The name of the call by which the peers of a run prove their positions."""
    return f"{run_id}.position.proof"


class ProofRequest(msgspec.Struct, frozen=True):
    """Which certificates led to this lineage, or (b"") to the furthest that you know? The answer is a LineageProof;
    earlier versions show nothing of the furthest."""

    lineage: Annotated[bytes, msgspec.Meta(max_length=LINEAGE_BYTES)]


async def hear(endpoint: Endpoint, run_id: str, peer: PeerID, named: str) -> Heard | None:
    """Asks a peer, `named` so for people, how far the run is; None: it proves nothing. A stranger may have made up all
    of it, so what is heard only makes a newcomer wait, and moves nobody."""
    try:
        method = method_of(run_id)
        proof = await endpoint.call(peer, method, ProofRequest(b""), LineageProof, timeout=ANSWER_TIMEOUT)
    except NetworkError as error:
        logger.debug("%s does not show how far the run is: %s", peer.short, error)
        return None
    position = await offload(proof.shows)
    return Heard(position.epoch, named, endpoint.clock.now(), proof) if position else None


class Vouching:
    """Gives the proof of this peer's lineage to whoever asks, by the call `method`, and asks others for theirs."""

    def __init__(self, endpoint: Endpoint, method: str, mates: Mates) -> None:
        """`mates`: those whose signatures count here."""
        self._endpoint, self._method, self._mates = endpoint, method, mates
        self.way = LineageWay()
        self.heard: Heard | None = None  # how far the run is; this peer shows it to others that ask
        self.signed_by_owner: SignedByOwner = lambda position, state, signature: False
        self.owners_word: tuple[LineagePosition, bytes, bytes] | None = None  # for a position: state hash, signature
        self.signed: dict[bytes, Signed] = {}  # lineage → mates that have signed the rounds that led there
        self.owners: dict[bytes, bytes] = {}  # lineage that the run's owner signed → SHA-256 of its parameters

    def start(self) -> None:
        self._endpoint.serve(self._method, ProofRequest, self._prove)

    def close(self) -> None:
        """Answers nobody any more. Idempotent."""
        self._endpoint.withdraw(self._method)

    def told_by_owner(self, position: LineagePosition) -> str:
        """For the report: the owner's word for this position, in hexadecimal; "": this peer does not have it."""
        if self.owners_word is None or self.owners_word[0] != position:
            return ""
        return (self.owners_word[1] + self.owners_word[2]).hex()

    def read_owners_words(self, reports: Iterable[PeerReport]) -> None:
        """Takes in the owner's words that reports carry; a few at a time, since each takes a signature's check."""
        fresh = [each for each in reports if each.owners_word and bytes.fromhex(each.lineage) not in self.owners]
        for report in fresh[:MOST_PROOFS]:
            position, word = report.claim.position, bytes.fromhex(report.owners_word)
            if len(self.owners) < MOST_SIGNED and self.signed_by_owner(position, word[:32], word[32:]):
                self.owners[position.lineage] = word[:32]

    def note_heard(self, *heard: Heard | None) -> None:
        """Keeps the furthest of what this peer has heard."""
        self.heard = max(filter(None, (self.heard, *heard)), key=lambda each: each.epoch, default=None)

    async def look_into(self, claims: Iterable[tuple[PeerID, LineagePosition]]) -> None:
        """Asks for the proofs of a few lineages without one: of each lineage the first peer that claims it."""
        asked: dict[LineagePosition, PeerID] = {}
        for peer, position in claims:
            if position.lineage not in self.signed and len(asked) < MOST_PROOFS:
                asked.setdefault(position, peer)
        await asyncio.gather(*(self.fetch(peer, at) for at, peer in asked.items()))

    async def fetch(self, peer: PeerID, position: LineagePosition) -> LineageProof | None:
        """Asks a peer for the proof of a position, and remembers which mates have signed it. None: the peer has none
        that fits."""
        question = ProofRequest(position.lineage)
        try:
            proof = await self._endpoint.call(peer, self._method, question, LineageProof, timeout=ANSWER_TIMEOUT)
        except NetworkError as error:
            logger.debug("%s did not prove its position: %s", peer.short, error)
            return None
        if not proof.leads_to(position):
            return None
        signed = await offload(partial(proof.signed, self._mates.known, self._mates.needed))
        if signed.members or position.lineage not in self.signed:
            self.signed[position.lineage] = signed
        while len(self.signed) > MOST_SIGNED:
            del self.signed[next(iter(self.signed))]
        return proof

    async def _prove(self, peer: PeerID, request: ProofRequest) -> LineageProof:
        if not request.lineage:
            own, heard = LineageProof(tuple(self.way)[-1:]), self.heard
            return heard.proof if heard and (not own.steps or heard.epoch > own.steps[-1].epoch) else own
        return self.way.proof(request.lineage)
