"""Kademlia with subkeys, expiration, owners and validators."""

from __future__ import annotations

from swarmcli.dht.dht import DHT
from swarmcli.dht.follower import Follower
from swarmcli.dht.keys import OwnedSubkey
from swarmcli.dht.limits import DHTLimits
from swarmcli.dht.node import DHTNode, DHTStatistics
from swarmcli.dht.records import ValueWithExpiration

__all__ = ["DHT", "DHTLimits", "DHTNode", "DHTStatistics", "Follower", "OwnedSubkey", "ValueWithExpiration"]
