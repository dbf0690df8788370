"""What a search for a group is for, what this peer brings along, and what the search wants done."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from swarmcli.averaging.matchmaking.candidates import Candidate
from swarmcli.network.identity import PeerID


@dataclass(frozen=True, slots=True)
class Goal:
    """What the search is for."""

    opens_at: float = -math.inf  # the group does not begin before this time
    target: float | None = None  # a standing group begins when its members' progress sums up to this
    only_one: bool = False  # there is one round for all: a group that others left behind does not begin
    crew: frozenset[PeerID] = frozenset()  # who was in the last group, and is expected again for a while
    only_crew: bool = False  # nobody else is waited for who does not look for a group yet
    keep_looking: bool = True  # when time is up and too few are here, look on instead of giving up


@dataclass(slots=True)
class Moves:
    """What to do now; at `wake_at` at the latest the next moves are due."""

    wake_at: float
    ask: Candidate | None = None
    stranded: bool = False  # it ranks behind this peer, and is asked because nobody is left to lead
    invite: list[Candidate] = field(default_factory=list)
    redirect: list[PeerID] = field(default_factory=list)  # former followers, to be sent on to the new leader
    leave: list[PeerID] = field(default_factory=list)  # leaders that are not followed after all
    begin: bool = False
    missed: bool = False  # the round has begun elsewhere
    give_up: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """What this peer brings into a group."""

    terms: dict[str, str]
    gathered: bytes
    bandwidth: float | None  # as the user gave it
    measured: float | None  # bytes per second, from past rounds
    auxiliary: bool
    since: float  # swarm time at which it came up
    newcomer: bool  # it has been in no group yet
