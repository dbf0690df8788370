"""Peers, connections between them, and calls over these."""

from swarmcli.errors import EndOfStream
from swarmcli.network.addresses import Address, format_address, parse_address
from swarmcli.network.endpoint import Endpoint, EndpointStatistics
from swarmcli.network.identity import Identity, PeerID, verify
from swarmcli.network.limits import Limits
from swarmcli.network.streams.stream import Stream
from swarmcli.network.transports.base import Buffer, DirectTransport, Purpose, Transport

__all__ = [
    "Address",
    "Buffer",
    "DirectTransport",
    "EndOfStream",
    "Endpoint",
    "EndpointStatistics",
    "Identity",
    "Limits",
    "PeerID",
    "Purpose",
    "Stream",
    "Transport",
    "format_address",
    "parse_address",
    "verify",
]
