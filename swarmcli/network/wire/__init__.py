"""What goes over the wire: messages, and how they become bytes."""

from swarmcli.network.wire.codec import decode, encode

__all__ = ["decode", "encode"]
