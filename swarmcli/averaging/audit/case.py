"""A case: everything that tells whether one average comes of its inputs, as its reducer has signed it.

    the average is false   FalseAverage: the reducer is banned
    it is true             FalseAccusation: the accuser, which has signed the accusation, is banned
    neither                the reducer did not sign for this case: it proves nothing

Every judge computes the average again; no member's word counts. The work is that of reducing one part.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum

from swarmcli.averaging.audit.signed import Exchange, Input, averages_root, digest_of, inputs_hash, why_unsound
from swarmcli.averaging.audit.verdict import (
    ACCUSED_BEYOND,
    FALSE_BEYOND,
    TRUE_WITHIN,
    NoInput,
    Redone,
    Terms,
    is_equal,
    is_within,
    redo,
)
from swarmcli.averaging.consensus.messages import DIGEST_BYTES, SignedAverages
from swarmcli.compression import NoCompression, TensorMessage
from swarmcli.errors import CompressionError
from swarmcli.network.identity import Identity, PeerID, verify

_PURPOSE = "accusation"


class Verdict(Enum):
    TRUE = "the average comes of its inputs"
    UNCLEAR = "the case proves nothing"
    FALSE = "the average does not come of its inputs"


@dataclass(frozen=True)
class Statement:
    """A reducer's signed statement about all its averages in one try.

    parts            their numbers, in its order
    digests, inputs  32 bytes for each part, one behind the other
    """

    parts: tuple[int, ...]
    digests: bytes
    inputs: bytes
    signed: SignedAverages

    def is_by(self, reducer: PeerID, where: Exchange) -> bool:
        whole = len(self.parts) * DIGEST_BYTES == len(self.digests) == len(self.inputs)
        same = whole and self.signed.root == averages_root(self.digests, self.inputs)
        return same and self.signed.is_by(reducer, where.prefix, where.group_id)

    def about(self, part: int) -> tuple[bytes, bytes] | None:
        """The digest of a part's average, and the hash of its inputs."""
        if part not in self.parts:
            return None
        place = self.parts.index(part) * DIGEST_BYTES
        return self.digests[place : place + DIGEST_BYTES], self.inputs[place : place + DIGEST_BYTES]


@dataclass(frozen=True)
class Case:
    """One part of one reducer.

    members            of the group
    senders, weights   of the inputs in the average, as the reducer named them
    average            after decoding (of NoCompression); None without senders
    inputs, messages   that the reducer signed for, and their content. Where one of the inputs is unsound by itself,
                       messages prove nothing more and may be missing
    """

    where: Exchange
    members: tuple[PeerID, ...]
    terms: Terms
    statement: Statement
    senders: tuple[int, ...]
    weights: tuple[float, ...]
    average: TensorMessage | None
    inputs: tuple[Input, ...]
    messages: tuple[TensorMessage, ...]

    @property
    def reducer(self) -> PeerID:
        return self.members[self.terms.reducer]

    def verdict(self) -> Verdict:
        """Never raises, whatever the case holds."""
        return self._verdict(FALSE_BEYOND)

    def deserves_accusation(self) -> bool:
        """Whether the average is false beyond the tolerance of any judge."""
        return self._verdict(ACCUSED_BEYOND) is Verdict.FALSE

    def why_unsound(self) -> str:
        return why_unsound(self.inputs, self.terms.part, self.members, self.where)

    def shows_what_was_signed(self) -> bool:
        """Whether the reducer has signed for these inputs and this average."""
        about = self.statement.about(self.terms.part)
        if about is None or not self.statement.is_by(self.reducer, self.where):
            return False
        return about == (digest_of(self.terms.part, self.senders, self.weights, self.average), inputs_hash(self.inputs))

    def is_complete(self) -> bool:
        """Whether it can be judged: everything that the reducer signed for is here."""
        return self.shows_what_was_signed() and (bool(self.why_unsound()) or self._has_inputs())

    def _has_inputs(self) -> bool:
        pairs = zip(self.inputs, self.messages, strict=False)
        return len(self.inputs) == len(self.messages) and all(
            each.fits(self.terms.part, shown) for each, shown in pairs
        )

    def _verdict(self, tolerances: float) -> Verdict:
        if not self.shows_what_was_signed():
            return Verdict.UNCLEAR
        if self.why_unsound():
            return Verdict.FALSE
        if not self._has_inputs():
            return Verdict.UNCLEAR
        try:
            redone = redo(self.terms, self.inputs, self.messages)
        except NoInput:
            return Verdict.FALSE
        return self._compare(redone, tolerances)

    def _compare(self, redone: Redone, tolerances: float) -> Verdict:
        if (self.senders, self.weights[: len(self.senders)]) != (redone.senders, redone.weights):
            return Verdict.FALSE
        if redone.values is None or self.average is None:
            return Verdict.TRUE if redone.values is None and self.average is None else Verdict.FALSE
        try:
            claimed = NoCompression().extract(self.average)
        except CompressionError:
            return Verdict.FALSE  # the reducer has signed the digest of something that is no average
        if claimed.dtype is not self.terms.descriptor.dtype or claimed.numel() != self.terms.descriptor.numel:
            return Verdict.FALSE
        values = claimed.reshape(-1)
        if is_equal(self.terms, redone, values) or is_within(self.terms, redone, values, TRUE_WITHIN):
            return Verdict.TRUE
        return Verdict.UNCLEAR if is_within(self.terms, redone, values, tolerances) else Verdict.FALSE


@dataclass(frozen=True)
class FalseAverage:
    """A reducer signed for an average that does not come of the inputs that it signed for."""

    case: Case

    @property
    def culprit(self) -> PeerID:
        return self.case.reducer

    def verify(self) -> bool:
        """Computes the average of one part again."""
        return self.case.verdict() is Verdict.FALSE

    def words(self) -> str:
        return f"its average of part {self.case.terms.part} does not come of the inputs that it signed for"


def sign_accusation(accuser: Identity, case: Case) -> bytes:
    """The accuser's word that the reducer's average is false."""
    return accuser.sign(_PURPOSE, *_accusation(case))


def is_accusation(accuser: PeerID, signature: bytes, case: Case) -> bool:
    """Whether the accuser has signed that the reducer's average is false."""
    return verify(accuser, _PURPOSE, signature, *_accusation(case))


@dataclass(frozen=True)
class FalseAccusation:
    """A peer signed that an average is false, and it is true."""

    culprit: PeerID
    signature: bytes
    case: Case

    def verify(self) -> bool:
        """Computes the average of one part again."""
        accused = is_accusation(self.culprit, self.signature, self.case)
        return accused and self.case.verdict() is Verdict.TRUE

    def words(self) -> str:
        return f"it accused {self.case.reducer.short} of a false average that is true"


def _accusation(case: Case) -> tuple[bytes, ...]:
    where, root = case.where, case.statement.signed.root
    return where.prefix.encode(), where.group_id, case.reducer, root, struct.pack(">Q", case.terms.part)
