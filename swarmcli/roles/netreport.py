"""What `swarm netcheck` has found out, as values: for people in words, for programs as JSON.

Texts of other peers are data: what a contact says about us may be wrong, and its name is not shown.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyReport:
    """Of one family of addresses: who can dial this computer there, and as what others see it."""

    family: str  # "IPv4" or "IPv6"
    dialable: bool | None = None  # None: not known
    scope: str = ""  # "host", "lan" or "internet": from how far away, or how far those are who cannot
    how: str = ""  # how that was found out, in words
    addresses: tuple[str, ...] = ()  # at which others can dial it
    seen: str | None = None  # where a contact sees it
    # "none"; "independent": everyone sees the same port of the router, so holes can be punched; "dependent": everyone
    # sees another one, so they cannot. None: not known, since it takes two contacts.
    translation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingReport:
    """The port that the router opened, or why it did not."""

    gateway: str = ""
    method: str = ""
    address: str = ""  # host and port, as the router claims
    problem: str = ""
    asked: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport:
    """Another peer. Rates are bytes per second, times seconds; None: not known, and `problem` may say why."""

    peer: str
    address: str = ""
    relayed: bool = False  # it is reached over a third one
    relays: bool = False  # it carries this peer's connections
    round_trip: float | None = None
    down: float | None = None
    up: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetReport:
    sentence: str  # what it all means for taking part
    listening: tuple[str, ...] = ()  # this computer's own addresses
    families: tuple[FamilyReport, ...] = ()
    mapping: MappingReport = MappingReport()
    peers: tuple[PeerReport, ...] = ()
    clock_offset: float | None = None  # seconds by which the swarm's clock is ahead of this computer's; None: not known

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
