"""Peers, connections between them, and calls over these."""

from swarmcli.network.bounds import NetworkLimits
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.streams.stream import Stream
from swarmcli.network.transports.base import DirectTransport, Purpose, Transport

__all__ = ["DirectTransport", "Endpoint", "Identity", "NetworkLimits", "PeerID", "Purpose", "Stream", "Transport"]
