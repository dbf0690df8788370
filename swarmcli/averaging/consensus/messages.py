"""The messages of a group's members about the outcome of their round; `ballots.py` says what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import msgspec

from swarmcli.averaging.group import GROUP_ID_BYTES, MAX_MEMBERS
from swarmcli.network.identity import SIGNATURE_BYTES, PeerID, verify

AVERAGES = "averages"  # purpose of a reducer's signature over the digests of all its averages
MAX_SIGNED = 1024  # reducers whose signatures one message carries
MAX_WORDS = 500
DIGEST_BYTES = 32
MAX_UNLIKE = 16  # values that voters have voted for instead of another one, in one answer
MAX_PARTS = 24_576  # of a plan whose averages are copied: so many digests fit into one message

Hash = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
GroupID = Annotated[bytes, msgspec.Meta(min_length=GROUP_ID_BYTES, max_length=GROUP_ID_BYTES)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)]
Indices = Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
Words = Annotated[str, msgspec.Meta(max_length=MAX_WORDS)]
Ballot = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Digests = Annotated[bytes, msgspec.Meta(max_length=MAX_PARTS * DIGEST_BYTES)]
Standing: TypeAlias = Literal["running", "expected", "over", "unknown"]

Signature = Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Signatures = Annotated[dict[Index, Signature], msgspec.Meta(max_length=MAX_MEMBERS)]

# vote     in a guarded group: the signer holds this result at ballot zero, or accepts the value proposed above it. Once
#          for each ballot.
# confirm  in a guarded group: the signer has seen a quorum of votes for it, and no unlike one at any other member.
# accept   in any other group, in the place of both.
Kind: TypeAlias = Literal["vote", "confirm", "accept"]

ZERO = 0  # the ballot that has no proposer


class Committed(msgspec.Struct, frozen=True, tag=True):
    digest: Hash


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """The round is given up. `suspects`: members that had better not be in the next one."""

    reason: Words
    suspects: Indices = ()


class Again(msgspec.Struct, frozen=True, tag=True):
    """The members begin again, as far as averages are missing.

    members    that go on; the others are lost
    reducers   members that reduce the parts that no member holds
    held       digests of the averages that a member holds, 32 bytes for each part; zeros for a part that none holds
    """

    members: Indices
    reducers: Indices
    held: Digests


Decision: TypeAlias = Committed | Aborted | Again


class Certificate(msgspec.Struct, frozen=True):
    """Members' signatures for one value in one ballot; `certificate.py` says what they prove.

    value       its hash
    signatures  by member
    """

    ballot: Ballot
    kind: Kind
    value: Hash
    signatures: Signatures


Unlike = Annotated[tuple[Certificate, ...], msgspec.Meta(max_length=MAX_UNLIKE)]


class Decided(msgspec.Struct, frozen=True):
    """A decision, and the votes that prove it. Each member that gets one checks them: no word is enough."""

    decision: Decision
    votes: Certificate


class Prepared(msgspec.Struct, frozen=True):
    """A value and a quorum's votes for it in one ballot of a guarded group: no other value can have as many there."""

    value: Decision
    votes: Certificate


class SignedPromise(msgspec.Struct, frozen=True):
    """A voter's answer to Prepare in a guarded group, as the proposer shows it to everyone.

    prepared   the ballot of the highest certificate that the voter has seen; None: it has seen none
    value      the hash of the value there
    zero       the digest that it has voted for at ballot zero
    signature  over all of these
    """

    ballot: Ballot
    prepared: Ballot | None
    value: Hash | None
    zero: Hash | None
    signature: Signature


Promises = Annotated[dict[Index, SignedPromise], msgspec.Meta(max_length=MAX_MEMBERS)]


@dataclass(frozen=True, slots=True)
class Promise:
    """Answer to Prepare: the acceptor accepts nothing below `ballot` any more, and has accepted this value so far.

    Raises ValueError for an answer that no honest acceptor gives.
    """

    ballot: int
    accepted_ballot: int | None = None
    accepted: Decision | None = None

    def __post_init__(self) -> None:
        if (self.accepted_ballot is None) != (self.accepted is None):
            raise ValueError("a promise names a value and the ballot of it, or neither")
        if self.accepted_ballot is not None and not ZERO <= self.accepted_ballot <= self.ballot:
            raise ValueError(f"promise for ballot {self.ballot}, with a value of ballot {self.accepted_ballot}")
        if self.accepted_ballot == ZERO and not isinstance(self.accepted, Committed):
            raise ValueError("only results are accepted at ballot zero")


class VoteMessage(msgspec.Struct, frozen=True):
    """A member's word to the leader: the digest of the result that it holds, which is its vote at ballot zero, with its
    signature; or (None) the reason why it holds none."""

    group_id: GroupID
    digest: Hash | None = None
    reason: Words = ""
    signature: Signature | None = None


class OutcomeQuestion(msgspec.Struct, frozen=True):
    """Asks for the outcome of the round. The member answers as soon as it knows, or knows that it never will."""

    group_id: GroupID


class OutcomeAnswer(msgspec.Struct, frozen=True):
    """`decided` is None if the member does not know the outcome and never will. `twice`: the votes of members that
    voted twice; with more than f such members the round is void there."""

    decided: Decided | None = None
    twice: Unlike = ()


class PresenceQuestion(msgspec.Struct, frozen=True):
    """Asks whether a member has begun this round. It answers at once."""

    group_id: GroupID


class PresenceAnswer(msgspec.Struct, frozen=True):
    """running: it takes part. expected: it will, but still computes. over: it has left. unknown: it knows no such
    round."""

    standing: Standing
    decided: Decided | None = None  # if it knows the outcome
    idle: bool = False  # it has nothing more to do in the round, and waits for the outcome


class SignedAverages(msgspec.Struct, frozen=True):
    """A reducer's signature for the averages that it gave: `averages_root` of the digests of all its parts."""

    root: Hash
    signature: Signature

    def is_by(self, reducer: PeerID, prefix: str, group_id: bytes) -> bool:
        """Whether this reducer signed it, in this try of this averager. The prefix counts: a leader could give one
        group to two averagers of a peer."""
        return verify(reducer, AVERAGES, self.signature, prefix.encode(), group_id, self.root)


SignedByReducer = Annotated[dict[Index, SignedAverages], msgspec.Meta(max_length=MAX_SIGNED)]


class Report(msgspec.Struct, frozen=True):
    """The averages that a member has, and could bring to another try.

    digest     of the result, if all of it is here
    plan       fingerprint of the plan of the round, which says what the parts are
    digests    of the averages that are here, 32 bytes for each part, zeros for one that is not
    reason     why averages are missing
    failed     the reducers whose averages are missing, and members that gave false copies
    signed     the reducers' signatures for this member in this try: two unlike ones of a reducer prove that it lied
    """

    digest: Hash | None
    plan: Hash
    digests: Digests = b""
    reason: Words = ""
    failed: Indices = ()
    signed: SignedByReducer = {}


class Prepare(msgspec.Struct, frozen=True):
    """A proposer begins a ballot. A member answers once its own exchange of parts has ended."""

    group_id: GroupID
    ballot: Ballot


class PrepareAnswer(msgspec.Struct, frozen=True):
    """An acceptor's answer to Prepare.

    decided    the outcome is known here; nothing else counts then
    promise    None: a higher ballot was promised, or this member follows another one
    promised   the highest ballot that was promised
    follows    the member of a lower rank that leads, as this member sees it
    report     with a promise, by a member that has not left the round; and by auxiliaries of a guarded group
    signed     in a guarded group, in the place of `promise`
    prepared   the certificate of which `signed` speaks
    twice      as in OutcomeAnswer
    """

    decided: Decided | None = None
    promise: Promise | None = None
    promised: Ballot = 0
    follows: Annotated[int, msgspec.Meta(ge=0)] | None = None
    report: Report | None = None
    signed: SignedPromise | None = None
    prepared: Prepared | None = None
    twice: Unlike = ()


class Propose(msgspec.Struct, frozen=True):
    """A proposer asks a member to accept a value; at ballot zero the leader asks auxiliaries to accept the result.

    promises   in a guarded group: of a quorum of voters, from which the value follows
    prepared   the highest certificate of which they speak
    """

    group_id: GroupID
    ballot: Ballot
    value: Decision
    promises: Promises = {}
    prepared: Prepared | None = None


class ProposeAnswer(msgspec.Struct, frozen=True):
    """`signature`: the vote for the value; None: the member does not accept it."""

    signature: Signature | None = None
    promised: Ballot = 0
    decided: Decided | None = None  # if the outcome is known here


class Confirm(msgspec.Struct, frozen=True):
    """In a guarded group, from the leader or a proposer: a quorum has voted for this. A voter answers once it has
    compared it with all others."""

    group_id: GroupID
    prepared: Prepared


class ConfirmAnswer(msgspec.Struct, frozen=True):
    """`signature`: the confirm; None: the voter does not confirm. `unlike`: votes for other values, the reason."""

    signature: Signature | None = None
    unlike: Unlike = ()
    decided: Decided | None = None


class Compare(msgspec.Struct, frozen=True):
    """In a guarded group: before it confirms, a voter asks another whether that knows of an unlike value. The other
    answers at once."""

    group_id: GroupID
    prepared: Prepared


class CompareAnswer(msgspec.Struct, frozen=True):
    """
    standing   the certificate that the answerer has confirmed, or compares itself, if its value is another one
    unlike     votes for other values in the same ballot
    """

    standing: Prepared | None = None
    unlike: Unlike = ()
    decided: Decided | None = None


class HoldingsQuestion(msgspec.Struct, frozen=True):
    """Asks for the averages of which a member could give copies, if the plans of the two are equal."""

    group_id: GroupID
    plan: Hash


class HoldingsAnswer(msgspec.Struct, frozen=True):
    digests: Digests = b""  # as in Report
    signed: SignedByReducer = {}


class AbsenceNotice(msgspec.Struct, frozen=True):
    """From the leader to the others: it cannot reach this member. Members that have not heard of it need not wait."""

    group_id: GroupID
    member: Index
    reason: Words


class Noted(msgspec.Struct, frozen=True):
    """The empty answer."""
