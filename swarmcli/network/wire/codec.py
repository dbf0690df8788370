"""Typed messages as msgpack, decoded strictly: what is not exactly of the expected type is an error.

Structs may have fields of type PeerID; on the wire they are 32 bytes.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from swarmcli.network.identity import PeerID
from swarmcli.network.transports.base import Buffer

T = TypeVar("T")


def encode(message: Any) -> bytes:
    """The message in msgpack. Raises TypeError for what msgpack cannot carry."""
    return _encoder.encode(message)


def decode(message_type: type[T], data: Buffer | msgspec.Raw) -> T:
    """Reads one message. Whatever is wrong with it, the error is a msgspec.DecodeError (or ValidationError, its kind).

    `message_type` may also be a union of tagged structs.
    """
    try:
        return _decoder(message_type).decode(data)
    except UnicodeDecodeError as error:  # msgspec lets these two through as they are
        raise msgspec.DecodeError(f"text that is not UTF-8: {error.reason}") from None
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None


def _encode_hook(value: Any) -> bytes:
    if isinstance(value, PeerID):
        return bytes(value)
    raise TypeError(f"{type(value).__name__} cannot be sent: {value!r:.100}")


def _decode_hook(expected: type, value: Any) -> Any:
    if expected is PeerID and isinstance(value, bytes):
        return PeerID(value)
    raise ValueError(f"expected {expected.__name__}, got {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_hook)


_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}  # as many as there are message types in the program


def _decoder(message_type: type[T]) -> msgspec.msgpack.Decoder[T]:
    decoder = _decoders.get(message_type)
    if decoder is None:
        decoder = _decoders[message_type] = msgspec.msgpack.Decoder(message_type, dec_hook=_decode_hook)
    return decoder
