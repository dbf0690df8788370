"""Reading one key again and again, at the cost of what has changed."""

from __future__ import annotations

from collections.abc import Sequence

from swarmcli.dht.core import NodeCore
from swarmcli.dht.keys import NO_SUBKEY, Subkey, decode_subkey, key_id
from swarmcli.dht.reading import KeyRead, Reader
from swarmcli.dht.records import TOMBSTONE, Record, ValueWithExpiration, decode_value
from swarmcli.dht.routing import Contact
from swarmcli.dht.traversal import gather_answers
from swarmcli.errors import DHTError, NetworkError

_SEARCH_INTERVAL = 15.0  # seconds after which the replicas are looked up anew: nearer nodes may have come


class Follower:
    """The dictionary under a key, kept up to date by `refresh`.

    Each replica is asked only for what it has stored since it was last read. A replica that restarted counts anew,
    which its reply shows; then all of it is read again. Concurrent refreshes do no harm, but each asks for itself.
    """

    def __init__(self, core: NodeCore, reader: Reader, key: str) -> None:
        self.key = key
        self._core = core
        self._reader = reader
        self._read = KeyRead(key_id(key))
        self._replicas: Sequence[Contact] = ()
        self._search_at = float("-inf")  # loop time
        self._seen: dict[bytes, tuple[Record, Subkey, ValueWithExpiration]] = {}
        self.refused = core.checker.watch(key)  # rule → how many records under the key did not pass it here

    @property
    def outdated(self) -> int:
        """How often a replica told of a record whose owner had replaced it: it lags, or repeats old ones on purpose."""
        return self._read.outdated

    async def refresh(self) -> dict[Subkey, ValueWithExpiration]:
        """Subkey → value, as of now. Replicas that do not answer are left out; nothing is raised for them."""
        if self._core.loop_time() >= self._search_at or not await self._read_replicas():
            await self._search()
        self._update(self._core.now())
        return {subkey: value for _, subkey, value in self._seen.values()}

    async def _search(self) -> None:
        (lookup,) = await self._reader.read([self._read], latest=True)
        self._search_at = self._core.loop_time() + _SEARCH_INTERVAL
        self._replicas = lookup.nearest()
        current = {contact.peer_id for contact in self._replicas} | {self._core.endpoint.peer_id}
        self._read.cursors = {peer: cursor for peer, cursor in self._read.cursors.items() if peer in current}

    async def _read_replicas(self) -> bool:
        """Whether all of them answered."""
        self._reader.read_own(self._read)
        others = [contact for contact in self._replicas if contact.peer_id != self._core.endpoint.peer_id]
        answers = await gather_answers(
            [self._reader.read_replica(contact, [self._read]) for contact in others], (NetworkError, DHTError)
        )
        return bool(self._replicas) and all(answer is not None for answer in answers)

    def _update(self, now: float) -> None:
        """Decodes what is new and drops what has ended."""
        for name, record in list(self._read.records.items()):
            if record.expiration <= now:
                # Whatever it had replaced has expired too, or would come back as news of some replica.
                del self._read.records[name]
            elif name != NO_SUBKEY and record.value != TOMBSTONE:
                seen = self._seen.get(name)
                if seen is None or seen[0] is not record:
                    value = ValueWithExpiration(decode_value(record.value), record.expiration)
                    self._seen[name] = (record, decode_subkey(name), value)
        for name, seen in list(self._seen.items()):
            if self._read.records.get(name) is not seen[0]:
                del self._seen[name]
