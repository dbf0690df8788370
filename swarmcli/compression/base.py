"""How a tensor becomes bytes and comes back: the interface of all codecs, and what they have in common.

A message is a small header, which travels in a frame's header, and buffers that lie one after the other in its
payload. Codecs that need not change a tensor's bytes give views of its memory, so nothing is copied.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import msgspec
import torch

from swarmcli.errors import CompressionError
from swarmcli.network.transports.base import Buffer

MAX_DIMENSIONS = 32
_MAX_EXTENT = 1 << 48  # elements along one dimension; keeps products of hostile shapes small

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    )
}


class TensorRole(Enum):
    """The use that its sender has for a tensor; codecs may treat roles differently."""

    UNSPECIFIED = "unspecified"
    ACTIVATION = "activation"
    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class TensorDescriptor:
    """Shape and type of a tensor, without its content."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorDescriptor:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CompressionInfo:
    """What a codec may choose by, besides the values."""

    descriptor: TensorDescriptor
    key: int | str | None = None  # the tensor's index or name among those that travel together
    role: TensorRole = TensorRole.UNSPECIFIED

    @classmethod
    def of(
        cls, tensor: torch.Tensor, key: int | str | None = None, role: TensorRole = TensorRole.UNSPECIFIED
    ) -> CompressionInfo:
        return cls(TensorDescriptor.of(tensor), key, role)

    from_tensor = of  # as hivemind calls it


class TensorHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the receiver needs to read the payload."""

    codec: str
    dtype: str  # of the tensor, without "torch."
    shape: tuple[int, ...]
    requires_grad: bool = False  # as hivemind's messages say it; for `compression.extract` alone

    @classmethod
    def of(cls, codec: str, tensor: torch.Tensor) -> TensorHeader:
        return cls(codec, dtype_name(tensor.dtype), tuple(tensor.shape), tensor.requires_grad)

    def descriptor(self) -> TensorDescriptor:
        """Raises CompressionError for an unknown dtype or an impossible shape. Allocates nothing."""
        dtype = _DTYPES.get(self.dtype)
        if dtype is None:
            raise CompressionError(f"unknown dtype {self.dtype[:40]!r}")
        if len(self.shape) > MAX_DIMENSIONS or not all(0 <= extent <= _MAX_EXTENT for extent in self.shape):
            raise CompressionError(f"impossible shape with {len(self.shape)} dimensions")
        return TensorDescriptor(self.shape, dtype)


@dataclass(frozen=True, slots=True)
class TensorMessage:
    """An encoded tensor. `payload` may share memory with the tensor that was compressed."""

    header: TensorHeader
    payload: Sequence[Buffer]

    @property
    def payload_size(self) -> int:
        return sum(memoryview(piece).nbytes for piece in self.payload)


class CompressionBase(ABC):
    """A codec. Instances hold no state between calls and may be used from several threads.

    name         the codec's name in headers, with all parameters that a reader of its messages needs
    by_content   whether an element's error depends on the others in its message. What is averaged is then cut at the
                 ends of tensors, so that small numbers do not share a message with those of a larger tensor.
    chunk        elements of a tensor that are encoded together, from its start. Such a tensor is cut between chunks.
    """

    name: str
    by_content: ClassVar[bool] = False
    chunk: ClassVar[int] = 1

    @property
    def description(self) -> str:
        """The codec with all its parameters. Peers that average together compare it."""
        return self.name

    @property
    def of_averages(self) -> CompressionBase:
        """The codec for averages of such messages: an average may have more nonzero elements than each of them."""
        return self

    def codec_for(self, info: CompressionInfo) -> CompressionBase:
        """The codec that a tensor of this kind is really sent with: adaptive codecs choose one for each tensor."""
        return self

    @abstractmethod
    def compress(self, tensor: torch.Tensor, info: CompressionInfo | None = None) -> TensorMessage:
        """Encodes a tensor. The message may be a view of it: it must not change until the message is used up.

        A codec sends tensors that it does not handle unchanged, such as integers where it encodes floating point
        numbers. Raises CompressionError for NaN and infinity if the codec cannot stand for them.
        """

    @abstractmethod
    def extract(self, message: TensorMessage, out: torch.Tensor | None = None) -> torch.Tensor:
        """Decodes a message, into `out` if given (same number of elements, contiguous).

        Without `out` the result may share memory with the payload. Raises CompressionError if the header does not
        fit the payload or `out`, before memory is allocated for what it promises, and for a payload that no encoder
        makes; `out` may hold anything then.
        """

    @abstractmethod
    def payload_bound(self, descriptor: TensorDescriptor) -> int:
        """The largest payload in bytes that a tensor of this kind can need."""

    def average_bound(self, descriptor: TensorDescriptor, senders: int) -> int:
        """The largest payload in bytes of an average of so many messages."""
        return self.of_averages.payload_bound(descriptor)


class NoCompression(CompressionBase):
    """The tensor's own bytes, little-endian. Exact, and neither side copies."""

    name = "none"

    def __init_subclass__(cls) -> None:
        # Receivers read payloads of this codec in place, without calling it.
        raise TypeError(f"{cls.__name__}: methods of its own would not be called; derive it from CompressionBase")

    def compress(self, tensor: torch.Tensor, info: CompressionInfo | None = None) -> TensorMessage:
        return TensorMessage(TensorHeader.of(self.name, tensor), (tensor_memory(tensor),))

    def extract(self, message: TensorMessage, out: torch.Tensor | None = None) -> torch.Tensor:
        descriptor = check_header(message, self.name, out)
        values = read_payload(message, descriptor.dtype, descriptor.numel)
        if descriptor.dtype is torch.bool and bool((values.view(torch.uint8) > 1).any()):
            raise CompressionError("a boolean tensor with bytes other than 0 and 1")
        return deliver(values, descriptor, out)

    def payload_bound(self, descriptor: TensorDescriptor) -> int:
        return descriptor.nbytes


def dtype_name(dtype: torch.dtype) -> str:
    """The name that headers use. Raises TypeError for types that do not travel."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise TypeError(f"tensors of type {dtype} cannot be sent; expected one of {', '.join(_DTYPES)}")
    return name


def tensor_memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor: a view if it is contiguous and on the CPU, otherwise a copy."""
    flat = tensor.detach().cpu().resolve_conj().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether there is neither NaN nor infinity in a tensor of floating point numbers."""
    # Both survive summation, and a sum is fifty times as fast as isfinite; but the sum of finite numbers may overflow.
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    return math.isfinite(tensor.sum(dtype=wide).item()) or bool(torch.isfinite(tensor).all())


def check_header(message: TensorMessage, codec: str, out: torch.Tensor | None) -> TensorDescriptor:
    """The tensor that a message claims to hold. Raises CompressionError if `codec` or `out` expect another."""
    if message.header.codec != codec:
        raise CompressionError(f"expected codec {codec}, got {message.header.codec[:40]!r}")
    descriptor = message.header.descriptor()
    if out is not None and (descriptor.numel, descriptor.dtype) != (out.numel(), out.dtype):
        raise CompressionError(
            f"expected {out.numel()} elements of {out.dtype}, got {descriptor.numel} of {descriptor.dtype}"
        )
    return descriptor


def read_payload(message: TensorMessage, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """The payload as a flat tensor, without a copy if it lies in one writable piece.

    Raises CompressionError unless it has exactly the right size.
    """
    expected = numel * dtype.itemsize
    if message.payload_size != expected:
        raise CompressionError(f"expected a payload of {expected} bytes, got {message.payload_size}")
    return read_numbers(payload_memory(message), dtype, numel)


def payload_memory(message: TensorMessage) -> Buffer:
    """The payload in one piece that may be written to: a copy only if it is not that already."""
    pieces = [memoryview(piece) for piece in message.payload]
    if len(pieces) == 1 and not pieces[0].readonly:
        return pieces[0]
    return bytearray().join(pieces)


def read_numbers(memory: Buffer, dtype: torch.dtype, count: int, offset: int = 0) -> torch.Tensor:
    """A flat tensor that shares the memory of `count` numbers, `offset` bytes into it. It must be large enough."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)


def deliver(values: torch.Tensor, descriptor: TensorDescriptor, out: torch.Tensor | None) -> torch.Tensor:
    """Gives flat decoded values the type and shape that were promised, in `out` if there is one."""
    if out is None:
        return values.to(descriptor.dtype).reshape(descriptor.shape)
    if values.data_ptr() != out.data_ptr() or values.dtype != out.dtype:
        out.reshape(-1).copy_(values)
    return out
