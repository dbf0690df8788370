"""Messages on the wire, and how they become bytes."""

from swarmcli.network.wire.codec import convert, decode, encode

__all__ = ["convert", "decode", "encode"]
