"""Where peers that look for a group find each other: declarations under a key of the hash table.

Each peer has one subkey that only it can write. What does not decode, or names another peer than its owner, is
passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec

from swarmcli.averaging.matchmaking.candidates import Candidate
from swarmcli.dht.keys import OwnedSubkey
from swarmcli.dht.node import DHTNode
from swarmcli.errors import DHTError, NetworkError
from swarmcli.network import wire

logger = logging.getLogger(__name__)


class Board(Protocol):
    """Where candidates declare themselves. Failures to reach it show as fewer declarations, not as errors."""

    async def declare(self, candidate: Candidate, lifetime: float) -> None:
        """Shows the candidate to everyone who reads, for `lifetime` seconds."""

    async def read(self) -> Sequence[Candidate]:
        """Who has declared."""

    async def withdraw(self) -> None:
        """Takes this peer's declaration back."""


class DHTBoard:
    """The board of one group key."""

    def __init__(self, node: DHTNode, key: str) -> None:
        self.key = key
        self._node = node
        self._follower = node.follow(key)

    async def declare(self, candidate: Candidate, lifetime: float) -> None:
        expiration = self._node.endpoint.clock.now() + lifetime
        value = wire.encode(candidate)
        try:
            stored = await self._node.store(self.key, value, expiration, subkey=self._node.own_subkey())
        except (NetworkError, DHTError) as error:
            logger.debug("%s is out of reach: %s", self.key, error)
        else:
            if not stored:
                logger.debug("no replica of %s took the declaration", self.key)

    async def read(self) -> Sequence[Candidate]:
        try:
            found = await self._follower.refresh()
        except (NetworkError, DHTError) as error:
            logger.debug("%s is out of reach: %s", self.key, error)
            return ()
        candidates = (_candidate(subkey, entry.value) for subkey, entry in found.items())
        return [candidate for candidate in candidates if candidate is not None]

    async def withdraw(self) -> None:
        await self._node.withdraw(self.key, self._node.own_subkey())


def _candidate(subkey: object, value: object) -> Candidate | None:
    if not isinstance(subkey, OwnedSubkey) or not isinstance(value, bytes):
        return None
    try:
        candidate = wire.decode(Candidate, value)
    except msgspec.DecodeError:
        return None
    return candidate if candidate.peer_id == subkey.owner else None
