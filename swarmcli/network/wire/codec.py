"""Typed messages as msgpack, decoded strictly: what is not exactly of the expected type is an error.

Structs may have fields of type PeerID; on the wire they are 32 bytes.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from swarmcli.errors import ProtocolViolation
from swarmcli.network.identity import PeerID
from swarmcli.words import printable

T = TypeVar("T")

_ENVELOPE = 256  # bytes that a message's own header may take


def encode(message: Any) -> bytes:
    """The message in msgpack. Raises TypeError for what msgpack cannot carry."""
    return _encoder.encode(message)


def decode(message_type: type[T], data: bytes | bytearray | memoryview | msgspec.Raw) -> T:
    """Reads one message. Whatever is wrong with it raises msgspec.DecodeError (or its subclass ValidationError).

    `message_type` may also be a union of tagged structs.
    """
    try:
        return _decoder(message_type).decode(data)
    except Exception as error:
        raise _unreadable(error) from None


def convert(message_type: type[T], value: Any) -> T:
    """The same for a value that was decoded as Any before."""
    try:
        return msgspec.convert(value, message_type, dec_hook=_decode_hook)
    except Exception as error:
        raise _unreadable(error) from None


def _unreadable(error: Exception) -> msgspec.DecodeError:
    """Any error of decoding as a DecodeError. msgspec lets some of Python's out as they are: for text that is not
    UTF-8, endless nesting, a date beyond the year 9999. Their words quote what could not be read, so they are made
    printable."""
    if isinstance(error, msgspec.DecodeError):
        return type(error)(printable(str(error)))
    return msgspec.DecodeError(printable(f"{type(error).__name__}: {error}"))


def encode_body(message: Any, max_message: int) -> msgspec.Raw:
    """A user's message for a control connection. Raises ValueError for one that is too large, TypeError."""
    body, room = encode(message), max_message - _ENVELOPE
    if len(body) > room:
        raise ValueError(f"a message of {len(body)} bytes is too large: at most {room}; use a stream")
    return msgspec.Raw(body)


def decode_header(message_type: Any, header: bytes) -> Any:
    """The message of a frame. Raises ProtocolViolation."""
    try:
        return decode(message_type, header)
    except msgspec.DecodeError as error:
        raise ProtocolViolation(f"unreadable message: {error}") from None


def decode_body(expected: type[Any], body: msgspec.Raw, method: str) -> Any:
    """A user's message. Raises ProtocolViolation if it is not exactly of the expected type."""
    try:
        return decode(expected, body)
    except msgspec.DecodeError as error:
        raise ProtocolViolation(f"unreadable message: {method}: {error}") from None


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
