"""Kademlia with subkeys, expiration, owners and validators."""

from __future__ import annotations

from swarmcli.dht.bounds import DHTLimits
from swarmcli.dht.dht import DHT
from swarmcli.dht.node import DHTNode
from swarmcli.dht.reading import Follower
from swarmcli.dht.records import OwnedSubkey, ValueWithExpiration

__all__ = ["DHT", "DHTLimits", "DHTNode", "Follower", "OwnedSubkey", "ValueWithExpiration"]
