"""What peers that look for a group say to each other, as typed messages. Bounds are checked while decoding."""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

import msgspec

from swarmcli.averaging.group import MAX_GATHERED_BYTES, GroupBody
from swarmcli.averaging.matchmaking.candidates import Candidate
from swarmcli.network.identity import PeerID

MAX_TERMS = 512
MAX_TERM_LENGTH = 256
MAX_GONE = 64  # members of a group that has begun, as named to those who came too late
MAX_REASON = 500  # characters

Verdict: TypeAlias = Literal["accepted", "follow", "full", "outranked", "begun", "cannot_lead", "terms"]
ReplyVerdict: TypeAlias = Literal["coming", "following", "outranked", "begun"]


class Joining(msgspec.Struct, frozen=True):
    """What a follower brings along."""

    patience: float  # seconds that it would still wait for a group that is not complete
    progress: float = 0.0  # see Progress
    stranded: bool = False  # nobody is left whom it could lead, so it asks whoever leads, of any rank
    bandwidth: float | None = None  # relative, as its user gave it
    measured: float | None = None  # bytes per second; see bandwidth.py
    auxiliary: bool = False
    gathered: bytes = b""

    def __post_init__(self) -> None:
        numbers = (self.patience, self.progress, self.bandwidth or 0.0, self.measured or 0.0)
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError("patience, progress and bandwidth are finite and not negative")
        if len(self.gathered) > MAX_GATHERED_BYTES:
            raise ValueError(f"gathered data has at most {MAX_GATHERED_BYTES} bytes")


class Join(msgspec.Struct, frozen=True):
    """Up the ranks: "may I follow you?". `terms` is the sender's fingerprint, key by key."""

    candidate: Candidate
    joining: Joining
    terms: dict[str, str]
    since: float  # swarm time at which the sender came up

    def __post_init__(self) -> None:
        check_terms(self.terms)


class Answer(msgspec.Struct, frozen=True):
    """To a Join.

    accepted      the sender follows the answerer from now on, and hears from it within `patience` seconds
    follow        the answerer follows `to` itself
    full          `to` leads those for whom there was no room; None: the sender itself should
    outranked     the sender ranks before the answerer, who did not know
    begun         the answerer's group has begun without the sender, and so have those that are `gone` with it
    cannot_lead   the answerer cannot be dialed and leads nobody
    terms         the two fingerprints differ under `keys`; the answerer came up at swarm time `since`
    """

    verdict: Verdict
    candidate: Candidate | None = None  # the answerer as it stands now
    to: Candidate | None = None
    keys: tuple[str, ...] = ()
    since: float = 0.0
    patience: float = 0.0
    gone: Annotated[tuple[PeerID, ...], msgspec.Meta(max_length=MAX_GONE)] = ()

    def __post_init__(self) -> None:
        check_patience(self.patience)


class Invitation(msgspec.Struct, frozen=True):
    """Down the ranks: "ask `to`", which is the sender, or the leader that the sender now follows itself."""

    sender: Candidate
    to: Candidate


class Reply(msgspec.Struct, frozen=True):
    """To an Invitation: coming; following somebody else (`to`); outranking the sender; begun without it."""

    verdict: ReplyVerdict
    candidate: Candidate | None = None
    to: Candidate | None = None
    gone: Annotated[tuple[PeerID, ...], msgspec.Meta(max_length=MAX_GONE)] = ()  # as in an Answer


class Heartbeat(msgspec.Struct, frozen=True):
    """From a leader to each follower. The next one comes within `patience` seconds, or the leader is gone."""

    search: bytes  # the leader's
    patience: float
    members: int  # in the group so far
    unreduced: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""  # why it cannot begin: nobody could reduce

    def __post_init__(self) -> None:
        check_patience(self.patience)


class Pulse(msgspec.Struct, frozen=True):
    """To a Heartbeat or a Progress: whether the two are still leader and follower, and the follower's progress."""

    together: bool
    progress: float = 0.0


class Progress(msgspec.Struct, frozen=True):
    """From a follower to its leader: how much it has done so far (cumulative) towards the group's target."""

    search: bytes  # the follower's
    progress: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.progress) and self.progress >= 0):
            raise ValueError("progress is finite and not negative")


class Leave(msgspec.Struct, frozen=True):
    """The sender is no longer part of what the receiver leads, or leads it no longer."""

    search: bytes  # the sender's


class Begin(msgspec.Struct, frozen=True):
    """From the leader to every follower: this is the group, and the round begins."""

    search: bytes  # the follower's, so that no earlier search is meant
    group: GroupBody
    waited_in_vain: bool = False  # somebody who was waited for has not come


class Done(msgspec.Struct, frozen=True):
    """To Leave and Begin."""


def check_patience(seconds: float) -> None:
    """Raises ValueError for a promise that no honest leader makes."""
    if not 0 <= seconds <= 3600:
        raise ValueError("a leader's patience is between 0 and 3600 s")


def check_terms(terms: dict[str, str]) -> None:
    """Raises ValueError for fingerprints beyond the bounds."""
    if len(terms) > MAX_TERMS or any(len(part) > MAX_TERM_LENGTH for item in terms.items() for part in item):
        raise ValueError(f"a fingerprint has at most {MAX_TERMS} entries of {MAX_TERM_LENGTH} characters")
