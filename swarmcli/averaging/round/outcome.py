"""The outcome of one round, as one member knows it: a certificate of equal votes, a proof that there can be none, or
neither yet. No I/O: `learn` takes what others know, `beyond` gives what they lack, and `move` says what to do next.

A voter signs at most one *echo* (among strangers: it holds a result with this digest), and then one *vote* or one
*give-up*, never both, and takes nothing back.

    certificate   a quorum of equal votes. Any two quorums have an honest voter in common, so there is at most one
    dead          so many have signed something else that no digest, seen or unseen, can have a quorum any more
    undecided     this member has signed, and knows neither: others may know a certificate

Among strangers a vote needs a quorum of equal echoes, so all honest votes of one list name one digest. The shape is
that of Bracha's reliable broadcast ("Asynchronous Byzantine agreement protocols", 1987), without its guarantee that
everybody delivers: the optimizer must survive a round of which it does not learn the outcome anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Annotated, TypeAlias

import msgspec

from swarmcli.averaging.certificate import (
    NOTHING,
    DoubleWord,
    Hash,
    Kind,
    Met,
    Quorum,
    RoundCertificate,
    Signatures,
    are_unlike,
    sign_word,
)
from swarmcli.averaging.config import Trust
from swarmcli.averaging.group import MAX_MEMBERS, Group
from swarmcli.network.identity import Identity, verify

MOST_SHEETS = 16  # in one message. Honest members need one of each kind, since they name one digest; liars name more

Bitmap = Annotated[bytes, msgspec.Meta(max_length=MAX_MEMBERS // 8)]


class Sheet(msgspec.Struct, frozen=True):
    """Signatures of one kind under one digest, by member."""

    kind: Kind
    digest: Hash
    signatures: Signatures


class SeenSheet(msgspec.Struct, frozen=True):
    """Whose signatures of this kind under this digest a member has; bit i of byte j is member 8 j + i."""

    kind: Kind
    digest: Hash
    members: Bitmap


# Words that a member shows, and the words that it has.
Known: TypeAlias = Annotated[tuple[Sheet, ...], msgspec.Meta(max_length=MOST_SHEETS)]
Seen: TypeAlias = Annotated[tuple[SeenSheet, ...], msgspec.Meta(max_length=MOST_SHEETS)]


class Action(Enum):
    """What a member does next; see `Next` for the digest of an ECHO, VOTE or FETCH."""

    WAIT = "wait"  # for the exchange, or for words of others
    ECHO = "echo"
    VOTE = "vote"
    GIVE_UP = "give up"
    FETCH = "fetch"  # the result with this digest, from those that have signed it
    COMMITTED = "committed"
    DEAD = "dead"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Next:
    move: Action
    digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class View:
    """What a member sees of its round besides signatures.

    holds         digest of the result that it holds; None: it does not hold all of it
    ended         its own exchange has ended, with or without a result
    busy          voters in reach that still exchange or fetch, or are about to sign, by their own word
    reach         voters in reach, without this one
    asked         it has asked everybody in reach since the last word that was new here
    unobtainable  digests of results that nobody in reach could give
    late          T2 has passed: it waits for nobody's exchange any more
    over          it has waited for news as long as it ever does
    """

    holds: bytes | None = None
    ended: bool = False
    busy: AbstractSet[int] = frozenset()
    reach: AbstractSet[int] = frozenset()
    asked: bool = False
    unobtainable: AbstractSet[bytes] = frozenset()
    late: bool = False
    over: bool = False


class RoundOutcome:
    """One member's knowledge of the outcome of one list, and its own words. Of a voter's words that exclude each other
    it keeps two at most: the second proves that the voter lies."""

    def __init__(
        self, group: Group, identity: Identity, trust: Trust = "strangers", met: Met = lambda member: True
    ) -> None:
        """`met`: whether this peer has met the member with this index, which may be no more than a key; only words of
        those count. Raises KeyError if `identity` is not a member."""
        self.group, self.quorum, self.met = group, Quorum.of(group, trust), met
        self.me = group.index_of(identity.peer_id)
        self._identity, self._trust = identity, trust
        self._words: dict[tuple[Kind, bytes], dict[int, bytes]] = {}  # signatures by voter
        self.proofs: dict[int, DoubleWord] = {}  # by voter

    # Known words

    def _signers(self, kind: Kind, digest: bytes = NOTHING) -> set[int]:
        """Members that have signed this and whose words count here."""
        return {member for member in self._words.get((kind, digest), ()) if self.met(member)}

    def _digests(self, kind: Kind) -> Iterator[bytes]:
        return (digest for each, digest in self._words if each == kind)

    @property
    def certificate(self) -> RoundCertificate | None:
        """The certificate of the result; None: this member does not have a quorum of votes."""
        for digest in self._digests("vote"):
            if self.quorum.decides(self._signers("vote", digest)):
                return RoundCertificate.of(self.group, self._trust, digest, self._words["vote", digest])
        return None

    @property
    def dead(self) -> bool:
        """Whether no result, seen or unseen, can have a certificate any more, whatever f liars sign yet."""
        voted = [self._signers("vote", digest) for digest in self._digests("vote")]
        signed = self._signers("give-up").union(*voted)
        return all(self.quorum.precludes(signed - votes) for votes in [set(), *voted])

    def has_signed(self, kind: Kind) -> bytes | None:
        """The digest of this member's own word of this kind; None: it has signed none."""
        return next((digest for digest in self._digests(kind) if self.me in self._words[kind, digest]), None)

    @property
    def closed(self) -> bool:
        """Whether this member has voted or given up: then it signs nothing else."""
        return self.has_signed("vote") is not None or self.has_signed("give-up") is not None

    @property
    def unsigned(self) -> AbstractSet[int]:
        """Voters of whom neither a vote nor a give-up is known."""
        return self.quorum.voters - {
            member for (kind, _), words in self._words.items() if kind != "echo" for member in words
        }

    def can_vote(self, digest: bytes) -> bool:
        """Whether this member may vote for a result that it holds."""
        return (
            self.me in self.quorum.voters
            and not self.closed
            and (not self.quorum.guarded or self.quorum.decides(self._signers("echo", digest)))
        )

    def holders(self, digest: bytes) -> set[int]:
        """Other members that have signed that they hold this result, or voted for it."""
        return (self._signers("echo", digest) | self._signers("vote", digest)) - {self.me}

    @property
    def named(self) -> list[bytes]:
        """Digests of results that others have signed, sorted by votes, then by echoes, most first. Among strangers
        votes count only with a quorum of equal echoes."""
        digests = dict.fromkeys([*self._digests("vote"), *self._digests("echo")])

        def rank(digest: bytes) -> tuple[int, int, bytes]:
            echoes = self._signers("echo", digest)
            voted = not self.quorum.guarded or self.quorum.decides(echoes)
            return len(self._signers("vote", digest)) if voted else 0, len(echoes), digest

        return sorted(filter(self.holders, digests), key=rank, reverse=True)

    # This member's own words. Each is signed once, and only through these.

    def echo(self, digest: bytes) -> bool:
        """Signs that this member holds this result. Returns whether its echo, perhaps an earlier one, is for it."""
        if self.me in self.quorum.voters and self.has_signed("echo") is None and not self.closed:
            self._sign("echo", digest)
        return self.has_signed("echo") == digest

    def vote(self, digest: bytes) -> bool:
        """Votes for a result that this member holds. Returns whether its vote, perhaps an earlier one, is for it."""
        if self.can_vote(digest):
            self._sign("vote", digest)
        return self.has_signed("vote") == digest

    def give_up(self) -> bool:
        """Signs that this member will never vote. Returns False if it has voted, or has no vote."""
        if self.me in self.quorum.voters and not self.closed:
            self._sign("give-up", NOTHING)
        return self.has_signed("give-up") is not None

    def _sign(self, kind: Kind, digest: bytes) -> None:
        words = self._words.setdefault((kind, digest), {})
        words[self.me] = sign_word(self._identity, self.group.group_id, kind, digest)

    # The words of others

    def learn(self, known: Known) -> bool:
        """Takes in the words that another member shows. A false signature ends its sheet: so a liar costs one check for
        each sheet. Returns whether anything was new. Never raises."""
        before = self._count()
        for sheet in known:
            if (sheet.kind == "give-up") == (sheet.digest == NOTHING):
                self._take(sheet)
        return self._count() > before

    def _count(self) -> int:
        return sum(map(len, self._words.values()))

    def _take(self, sheet: Sheet) -> None:
        words = self._words.get((sheet.kind, sheet.digest), {})
        for member, signature in sheet.signatures.items():
            if member in words or member not in self.quorum.voters or member == self.me:
                continue
            unlike = self._unlike(member, (sheet.kind, sheet.digest))
            if len(unlike) > 1:
                continue
            peer = self.group.members[member].peer_id
            if not verify(peer, sheet.kind, signature, self.group.group_id, sheet.digest):
                break
            words[member] = signature
            self._words[sheet.kind, sheet.digest] = words
            for (kind, digest), other in unlike.items():
                kinds, digests = (kind, sheet.kind), (digest, sheet.digest)
                proof = DoubleWord(peer, self.group.group_id, kinds, digests, (other, signature))
                self.proofs.setdefault(member, proof)

    def _unlike(self, member: int, word: tuple[Kind, bytes]) -> dict[tuple[Kind, bytes], bytes]:
        """The member's words that no honest member signs beside this word."""
        return {each: said[member] for each, said in self._words.items() if member in said and are_unlike(each, word)}

    @property
    def seen(self) -> Seen:
        """Whose words are here; others are shown that, so that they tell only what is new."""
        return tuple(SeenSheet(*word, _bitmap(words)) for word, words in self._most_signed())

    def beyond(self, seen: Seen, of: AbstractSet[int] | None = None) -> Known:
        """Words that a member lacks which has `seen` these; `of`: those of these members alone."""
        has = {(sheet.kind, sheet.digest): _members(sheet.members) for sheet in seen}
        sheets = []
        for word, words in self._most_signed():
            known = words.keys() if of is None else words.keys() & of
            if lacking := {member: words[member] for member in known - has.get(word, set())}:
                sheets.append(Sheet(*word, dict(sorted(lacking.items()))))
        return tuple(sheets)

    def _most_signed(self) -> list[tuple[tuple[Kind, bytes], dict[int, bytes]]]:
        """As many sheets as a message takes: this member's own words first, then those that voters with most weight
        have signed, without known liars. Otherwise liars, each with words of its own, would crowd out what decides."""

        def rank(each: tuple[tuple[Kind, bytes], dict[int, bytes]]) -> tuple[bool, Fraction | int, tuple[Kind, bytes]]:
            word, words = each
            return self.me not in words, -self.quorum.weight(words.keys() - self.proofs.keys()), word

        return sorted(self._words.items(), key=rank)[:MOST_SHEETS]

    # The next step

    def is_busy(self, view: View) -> bool:
        """Whether this member may yet sign anything but a give-up. Others that have no result wait for it then."""
        return not self.closed and (not view.ended or self.move(view).move in (Action.ECHO, Action.VOTE, Action.FETCH))

    def move(self, view: View) -> Next:
        """Returns what this member does next, by what it knows and sees. The caller does it and asks again; after WAIT,
        when anything has changed."""
        if (certificate := self.certificate) is not None:
            return Next(Action.COMMITTED, certificate.digest)
        if self.dead:
            return Next(Action.DEAD)
        if self.me not in self.quorum.voters or self.closed:
            nobody = view.asked and not self.unsigned & view.reach
            return Next(Action.UNDECIDED if nobody or view.over else Action.WAIT)
        if view.holds is not None and (echoed := self._say(view.holds)) is not None:
            return echoed
        for digest in self.named if view.ended else ():
            helps = self.can_vote(digest) or self.has_signed("echo") is None  # a word of this member could count for it
            if digest != view.holds and digest not in view.unobtainable and helps:
                return Next(Action.FETCH, digest)
        if view.late or (view.ended and view.asked and not view.busy & view.reach):
            return Next(Action.GIVE_UP)
        return Next(Action.WAIT)

    def _say(self, digest: bytes) -> Next | None:
        if self.can_vote(digest):
            return Next(Action.VOTE, digest)
        if self.quorum.guarded and self.has_signed("echo") is None:
            return Next(Action.ECHO, digest)
        return None


def exceeds(seen: Seen, other: Seen) -> bool:
    """Whether a member that has seen the first has words that one which has seen the other lacks."""
    has = {(sheet.kind, sheet.digest): _members(sheet.members) for sheet in other}
    return any(_members(sheet.members) - has.get((sheet.kind, sheet.digest), set()) for sheet in seen)


def _bitmap(members: Iterable[int]) -> bytes:
    number = sum(1 << member for member in members)
    return number.to_bytes((number.bit_length() + 7) // 8, "little")


def _members(bitmap: bytes) -> set[int]:
    number = int.from_bytes(bitmap, "little")
    return {index for index in range(8 * len(bitmap)) if number >> index & 1}
