"""The relays that advertise themselves in the hash table: what `reach`, which knows no hash table, is given of it."""

from __future__ import annotations

from swarmcli.dht.node import DHTNode
from swarmcli.dht.records import OwnedSubkey, node_id
from swarmcli.network.identity import PeerID
from swarmcli.reach.relay_records import MAX_RECORDS, RELAYS_KEY, RelayRecord, read_record


class RelayDirectory:
    """Reads and writes the records of relays. Without a node it knows nothing: reach begins before there is one."""

    def __init__(self) -> None:
        self.node: DHTNode | None = None

    async def find(self) -> dict[PeerID, RelayRecord]:
        """Who relays, by their own signed word; the readable records, at most MAX_RECORDS."""
        found = None if self.node is None else await self.node.get(RELAYS_KEY)
        if found is None or not isinstance(found.value, dict):
            return {}
        records: dict[PeerID, RelayRecord] = {}
        for subkey, (value, _) in found.value.items():
            record = read_record(value)
            if isinstance(subkey, OwnedSubkey) and subkey.name == b"" and record is not None:
                records[subkey.owner] = record
        return dict(list(records.items())[:MAX_RECORDS])

    async def publish(self, record: RelayRecord, seconds: float) -> bool:
        """Writes this peer's own record; whether anybody keeps it now."""
        if self.node is None:
            return False
        until = self.node.core.now() + seconds
        return await self.node.store(RELAYS_KEY, record.value(), until, self.node.own_subkey())

    async def where(self, relay: PeerID) -> tuple[str, ...]:
        """Where a relay can be dialed that another peer has named: its record, else by its place in the hash table."""
        records = await self.find()
        if relay in records:
            return records[relay].addresses
        if self.node is None:
            return ()
        core = self.node.core
        await core.explore(node_id(relay))
        return next((contact.addresses for contact in core.contacts.table if contact.peer_id == relay), ())
