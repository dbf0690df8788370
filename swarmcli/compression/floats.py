"""Codecs that send floating point numbers as shorter floating point numbers."""

from __future__ import annotations

import torch

from swarmcli.compression.base import (
    CompressionBase,
    CompressionInfo,
    NoCompression,
    TensorDescriptor,
    TensorHeader,
    TensorMessage,
    all_finite,
    check_header,
    deliver,
    read_payload,
    tensor_memory,
)
from swarmcli.errors import CompressionError

_LARGEST = torch.finfo(torch.float16).max  # 65504


class Float16Compression(CompressionBase):
    """IEEE half precision: 2 bytes per element.

    Error per element: at most 2⁻¹¹ of its magnitude, or 2⁻²⁵ near zero. Finite values beyond ±65504 are clipped;
    infinities and NaN stay what they are.
    """

    name = "float16"

    def compress(self, tensor: torch.Tensor, info: CompressionInfo | None = None) -> TensorMessage:
        if not tensor.is_floating_point():
            return NoCompression().compress(tensor, info)
        return TensorMessage(TensorHeader.of(self.name, tensor), (tensor_memory(_to_half(tensor.detach())),))

    def extract(self, message: TensorMessage, out: torch.Tensor | None = None) -> torch.Tensor:
        if message.header.codec == NoCompression.name:
            return NoCompression().extract(message, out)
        descriptor = check_header(message, self.name, out)
        if not descriptor.dtype.is_floating_point:
            raise CompressionError(f"half precision cannot stand for {descriptor.dtype}")
        return deliver(read_payload(message, torch.float16, descriptor.numel), descriptor, out)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        dtype = info.descriptor.dtype
        return torch.float16.itemsize / dtype.itemsize if dtype.is_floating_point else 1.0

    def payload_bound(self, descriptor: TensorDescriptor) -> int:
        itemsize = torch.float16.itemsize if descriptor.dtype.is_floating_point else descriptor.dtype.itemsize
        return descriptor.numel * itemsize


def _to_half(tensor: torch.Tensor) -> torch.Tensor:
    half = tensor.to(torch.float16)
    if all_finite(half):
        return half
    # bfloat16 has no 65504: clamped in its own type, a large value would come out as 65536, which is infinity here.
    wide = tensor if tensor.dtype is torch.float64 else tensor.float()
    return torch.where(torch.isinf(tensor), half, wide.clamp(-_LARGEST, _LARGEST).to(torch.float16))
