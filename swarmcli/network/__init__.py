"""Peers, connections between them, and calls over these."""

from swarmcli.errors import EndOfStream
from swarmcli.network.address import Address, format_address, parse_address
from swarmcli.network.identity import Identity, PeerID, verify
from swarmcli.network.limits import Limits
from swarmcli.network.memory import MemoryNetwork
from swarmcli.network.memory_transport import MemoryTransport
from swarmcli.network.rpc import Endpoint
from swarmcli.network.streams import Stream
from swarmcli.network.traffic import EndpointStatistics
from swarmcli.network.transport import Buffer, PeerInfo, Purpose, Transport

__all__ = [
    "Address",
    "Buffer",
    "EndOfStream",
    "Endpoint",
    "EndpointStatistics",
    "Identity",
    "Limits",
    "MemoryNetwork",
    "MemoryTransport",
    "PeerID",
    "PeerInfo",
    "Purpose",
    "Stream",
    "Transport",
    "format_address",
    "parse_address",
    "verify",
]
