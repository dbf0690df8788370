"""Connections over TCP, in TLS 1.3."""

from swarmcli.network.transports.tcp.transport import TCPTransport

__all__ = ["TCPTransport"]
