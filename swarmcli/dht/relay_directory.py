"""The relays that advertise themselves in the hash table: what `reach`, which knows no hash table, is given of it."""

from __future__ import annotations

from collections import defaultdict

from swarmcli.dht.node import DHTNode
from swarmcli.dht.records import OwnedSubkey, node_id
from swarmcli.network.identity import PeerID
from swarmcli.network.prefix import Prefix, prefix_of_address
from swarmcli.reach.relay_records import MAX_RECORDS, RELAYS_KEY, RelayRecord, read_record


class RelayDirectory:
    """Reads and writes the records of relays. Without a node it knows nothing: reach begins before there is one."""

    def __init__(self) -> None:
        self.node: DHTNode | None = None

    async def find(self) -> dict[PeerID, RelayRecord]:
        """Who relays, by their own signed word: readable records, at most MAX_RECORDS, one of each network prefix
        before a second of any, each by lot. So a thousand identities of one network are one relay among the others.

        Not the newest: whoever claims an honest relay's network would only have to write the last.
        """
        if self.node is None:
            return {}
        dice = self.node.endpoint.random
        records = await self._read(latest=True)
        peers = list(records)
        dice.shuffle(peers)
        turns: defaultdict[Prefix, int] = defaultdict(int)
        ranked: list[tuple[int, PeerID]] = []
        for peer in peers:
            prefix = prefix_of_address(records[peer].addresses[0])
            ranked.append((turns[prefix], peer))
            turns[prefix] += 1
        ranked.sort(key=lambda pair: pair[0])  # stable: within a turn the order stays drawn by lot
        return {peer: records[peer] for _, peer in ranked[:MAX_RECORDS]}

    async def publish(self, record: RelayRecord, seconds: float) -> bool:
        """Writes this peer's own record; whether anybody keeps it now."""
        if self.node is None:
            return False
        until = self.node.core.now() + seconds
        return await self.node.store(RELAYS_KEY, record.value(), until, self.node.own_subkey())

    async def where(self, relay: PeerID) -> tuple[str, ...]:
        """Where a relay can be dialed that another peer has named: its record, else by its place in the hash table."""
        records = await self._read(latest=False)
        if relay in records:
            return records[relay].addresses
        if self.node is None:
            return ()
        core = self.node.core
        await core.explore(node_id(relay))
        return next((contact.addresses for contact in core.contacts.table if contact.peer_id == relay), ())

    async def _read(self, *, latest: bool) -> dict[PeerID, RelayRecord]:
        """All of them. `latest`: of all replicas, since any one might show its friends alone."""
        found = None if self.node is None else await self.node.get(RELAYS_KEY, latest=latest)
        if found is None or not isinstance(found.value, dict):
            return {}
        records: dict[PeerID, RelayRecord] = {}
        for subkey, (value, _) in found.value.items():
            record = read_record(value)
            if isinstance(subkey, OwnedSubkey) and subkey.name == b"" and record is not None:
                records[subkey.owner] = record
        return records
