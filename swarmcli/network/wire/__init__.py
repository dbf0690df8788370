"""What goes over the wire: messages, how they become bytes, and who answers them."""

from swarmcli.network.wire.codec import decode, encode

__all__ = ["decode", "encode"]
