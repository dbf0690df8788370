"""Declarations in the hash table, by which peers that average with each other find each other.

Under the key of its bucket each peer has one subkey that only it can write, from the start of its averager to its end.
Readers pass over a record that does not decode, or that names another peer than its owner.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Sequence

import msgspec

from swarmcli.averaging.find.candidates import LIFETIME
from swarmcli.averaging.find.messages import Candidate
from swarmcli.averaging.group import Group
from swarmcli.dht.node import DHTNode
from swarmcli.dht.reading import Follower
from swarmcli.dht.records import OwnedSubkey
from swarmcli.errors import DHTError, NetworkError
from swarmcli.network import wire
from swarmcli.network.identity import PeerID

logger = logging.getLogger(__name__)


def group_key(prefix: str, bits: str) -> str:
    """The key under which peers of one bucket declare themselves."""
    return f"{prefix}.0b{bits}"


def next_bits(bits: str, group: Group, me: PeerID, target_size: int) -> str:
    """The bucket after a round in `group`: the grid of Moshpit SGD (arXiv 2103.03239, section 3.2).

    Members of one group go to different buckets, as far as there are enough. The group id fixes a shuffle of the
    members; a peer's position in it is appended to the bits in binary, and as many bits fall off at the front. So if
    all groups are full, everyone holds the mean of all after 1 + len(bits) / log2(target_size) rounds.
    """
    if not bits:
        return bits
    order = sorted(group.members, key=lambda member: hashlib.sha256(group.group_id + member.peer_id).digest())
    position = next(index for index, member in enumerate(order) if member.peer_id == me)
    width = max(1, math.ceil(math.log2(target_size)))
    return (bits + f"{position % 2**width:0{width}b}")[-len(bits) :]


class Declarations:
    """The declarations of one prefix. If the table is out of reach, there are fewer of them, but no errors.

    Each `publish` writes what the last `say` has set, so a slow or cancelled one cannot bring an older one back.
    """

    def __init__(self, node: DHTNode, prefix: str) -> None:
        self._node = node
        self._prefix = prefix
        self._own: Candidate | None = None
        self._published: Candidate | None = None
        self._follower: Follower | None = None

    def say(self, candidate: Candidate) -> None:
        """Sets this peer's declaration, which the next `publish` writes."""
        self._own = candidate

    async def publish(self, *, again: bool = False) -> None:
        """Writes the declaration, unless it stands there already; with `again` in any case.

        A peer that has moved writes it under the key of its former bucket too: readers there see that the peer has
        gone. Withdrawing the old one would take two lookups, and could end after a later declaration under that key.
        """
        own, published = self._own, self._published
        if own is None or (own == published and not again):
            return
        keys = {group_key(self._prefix, each.bits): None for each in (own, published or own)}
        expiration, subkey = self._node.endpoint.clock.now() + LIFETIME, self._node.own_subkey()
        try:
            values, subkeys = [wire.encode(own)] * len(keys), [subkey] * len(keys)
            stored = await self._node.store_many(list(keys), values, expiration, subkeys)
        except (NetworkError, DHTError) as error:
            logger.debug("%s is out of reach: %s", self._prefix, error)
            return
        self._published = own
        if not all(stored.values()):
            logger.debug("no replica of %s took the declaration", list(stored))

    async def keep_published(self) -> None:
        """Publishes again and again, until it is cancelled."""
        while True:
            await self.publish(again=True)
            await asyncio.sleep(LIFETIME / 2)

    async def read(self, bits: str) -> Sequence[Candidate]:
        """Returns the holders of the bucket, this peer among them; nobody if the table is out of reach."""
        key = group_key(self._prefix, bits)
        if self._follower is None or self._follower.key != key:
            self._follower = self._node.follow(key, only_bytes=True)
        try:
            found = await self._follower.refresh()
        except (NetworkError, DHTError) as error:
            logger.debug("%s is out of reach: %s", key, error)
            return ()
        candidates = (_candidate(subkey, entry.value) for subkey, entry in found.items())
        return [candidate for candidate in candidates if candidate is not None and candidate.bits == bits]

    async def withdraw(self) -> None:
        """Takes this peer's declaration back. Raises NetworkError or DHTError."""
        published, self._own, self._published = self._published, None, None
        if published is not None:
            await self._node.withdraw(group_key(self._prefix, published.bits), self._node.own_subkey())


def _candidate(subkey: object, value: object) -> Candidate | None:
    if not isinstance(subkey, OwnedSubkey) or not isinstance(value, bytes):
        return None
    try:
        candidate = wire.decode(Candidate, value)
    except msgspec.DecodeError:
        return None
    return candidate if candidate.peer_id == subkey.owner else None
