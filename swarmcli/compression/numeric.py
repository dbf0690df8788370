"""The common base of codecs of floating point numbers: tensors of other types travel unchanged."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch

from swarmcli.compression.base import (
    CompressionBase,
    CompressionInfo,
    NoCompression,
    TensorDescriptor,
    TensorHeader,
    TensorMessage,
    check_header,
    deliver,
    payload_memory,
)
from swarmcli.errors import CompressionError
from swarmcli.network.transports.base import Buffer

_TILE = 1 << 17  # elements; larger ones do not stay in the cache, smaller ones cost more calls


class FloatCodec(CompressionBase):
    """A codec of floating point numbers. The size of its messages follows from shape and type alone."""

    def handles(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this type are encoded; others travel unchanged."""
        return dtype.is_floating_point

    def codec_for(self, info: CompressionInfo) -> CompressionBase:
        return self if self.handles(info.descriptor.dtype) else NoCompression()

    def compress(self, tensor: torch.Tensor, info: CompressionInfo | None = None) -> TensorMessage:
        if not self.handles(tensor.dtype):
            return NoCompression().compress(tensor, info)
        header = TensorHeader.of(self.name, tensor)
        return TensorMessage(header, self._encode(tensor.detach().cpu().contiguous()) if tensor.numel() else ())

    def extract(self, message: TensorMessage, out: torch.Tensor | None = None) -> torch.Tensor:
        if not self.handles(message.header.descriptor().dtype):
            return NoCompression().extract(message, out)
        descriptor = check_header(message, self.name, out)
        if message.payload_size != (expected := self.payload_bound(descriptor)):
            raise CompressionError(f"expected a payload of {expected} bytes, got {message.payload_size}")
        values = self._memory(descriptor, out)
        if descriptor.numel:
            self._decode(payload_memory(message), descriptor, values)
        return deliver(values, descriptor, out)

    def payload_bound(self, descriptor: TensorDescriptor) -> int:
        """Exactly what a tensor of this kind takes."""
        return self._size(descriptor) if descriptor.numel and self.handles(descriptor.dtype) else descriptor.nbytes

    @abstractmethod
    def _encode(self, tensor: torch.Tensor) -> Sequence[Buffer]:
        """The payload of a contiguous tensor on the CPU that is not empty."""

    @abstractmethod
    def _decode(self, payload: Buffer, descriptor: TensorDescriptor, values: torch.Tensor) -> None:
        """Fills a flat tensor of the working type from a payload of the right size. Raises CompressionError."""

    @abstractmethod
    def _size(self, descriptor: TensorDescriptor) -> int:
        """Bytes of the payload for a tensor that is encoded and not empty."""

    @staticmethod
    def _memory(descriptor: TensorDescriptor, out: torch.Tensor | None) -> torch.Tensor:
        work = working_type(descriptor.dtype)
        if out is not None and out.dtype is work and out.device.type == "cpu":
            return out.reshape(-1)
        return torch.empty(descriptor.numel, dtype=work)


def working_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which codecs compute with numbers of a type, and send scales and levels: float64 or float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def tiles(table: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of pieces that cover a table (rows, columns), of at most 131072 elements each.

    Codecs work piece by piece: what they compute in between stays in the cache and takes no memory to speak of.
    """
    rows, width = table.shape
    height = max(1, _TILE // width)
    for top in range(0, rows, height):
        for left in range(0, width, _TILE):
            yield slice(top, top + height), slice(left, left + _TILE)


def smallest(dtype: torch.dtype) -> float:
    """The smallest positive number of a type."""
    limits = torch.finfo(dtype)
    return limits.tiny * limits.eps


def keep_within_(values: torch.Tensor, dtype: torch.dtype, largest: float) -> None:
    """Clamps numbers that rounding has carried beyond the range of `dtype`.

    `largest`: the bound of their magnitudes before rounding. Does nothing if that is far from the end of the range.
    """
    limit = torch.finfo(dtype).max
    if not largest < 0.99 * limit:
        values.clamp_(-limit, limit)


def not_finite(codec: str) -> CompressionError:
    """The error of a codec that has no code for NaN and infinity."""
    return CompressionError(f"the tensor holds NaN or infinity, which {codec} cannot stand for")
