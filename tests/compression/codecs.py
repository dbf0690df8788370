"""All codecs, and the error bound that the docstring of each states, in float64."""

from __future__ import annotations

import torch

from swarmcli.compression import (
    BFloat16Compression,
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    PerTensorCompression,
    Quantile8BitQuantization,
    RoleAdaptiveCompression,
    ScaledFloat16Compression,
    SizeAdaptiveCompression,
    TensorMessage,
    Uniform8BitQuantization,
)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]

PLAIN: list[CompressionBase] = [
    NoCompression(),
    Float16Compression(),
    BFloat16Compression(),
    ScaledFloat16Compression(),
    Uniform8BitQuantization(),
    Quantile8BitQuantization(),
    BlockwiseQuantization(),
    BlockwiseQuantization(16, "dynamic"),
    BlockwiseQuantization(block_size=64, code="linear"),
    BlockwiseQuantization(64, bits=4),
    BlockwiseQuantization(16, "linear", 4),
]
ADAPTIVE: list[CompressionBase] = [
    SizeAdaptiveCompression(8, Float16Compression(), Uniform8BitQuantization()),
    RoleAdaptiveCompression(gradient=NoCompression(), default=BlockwiseQuantization(32)),
    PerTensorCompression({"w": ScaledFloat16Compression()}),
]
CODECS = PLAIN + ADAPTIVE


def error_bound(codec: CompressionBase, tensor: torch.Tensor) -> torch.Tensor:
    """The largest error allowed, element by element."""
    exact, limits = tensor.double(), torch.finfo(tensor.dtype)
    if not tensor.numel() or codec.codec_for(CompressionInfo.of(tensor)).name == "none":
        return torch.zeros_like(exact)
    # Four roundings of the type, and of its smallest number: a sum of several is near zero one of each.
    rounding = 4 * limits.eps * exact.abs().max() + 4 * limits.tiny * limits.eps
    match codec:
        case Float16Compression():
            clipped = exact.clamp(-65504, 65504)
            # From float64 it goes through float32: that rounds too.
            return (exact - clipped).abs() + clipped.abs() * 2**-11 * (1 + 2**-11) + 2**-25
        case BFloat16Compression():
            clipped = exact.clamp(-torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).max)
            return (exact - clipped).abs() + clipped.abs() * 2**-8 * (1 + 2**-11) + 2.0**-134
        case ScaledFloat16Compression():
            rows = exact.reshape(-1, tensor.shape[-1] if tensor.shape and tensor.shape[-1] >= 64 else tensor.numel())
            # Divided first: squares of the largest numbers are beyond float64 too.
            size = rows.abs().amax(1, keepdim=True).clamp(min=1e-300)
            mean = (rows / size).mean(1, keepdim=True)
            distance, deviation = (rows / size - mean).abs() * size, (rows / size).std(1, False, keepdim=True) * size
            # Where the sum of a row is beyond the type's range its mean is not taken off.
            distance = torch.where(rows.abs().sum(1, keepdim=True) < limits.max / 2, distance, rows.abs() + size)
            rounding = 4 * limits.eps * size + 4 * limits.tiny * limits.eps
            return (2**-11 * distance + 2**-24 * deviation + rounding).reshape(exact.shape)
        case Uniform8BitQuantization():
            return (exact.max() / 510 - exact.min() / 510 + rounding).expand(exact.shape)
        case Quantile8BitQuantization():
            few = tensor.numel() <= 256
            return (torch.zeros(()) if few else exact.max() / 112 - exact.min() / 112 + rounding).expand(exact.shape)
        case BlockwiseQuantization():
            return blockwise_bound(codec, tensor)
    raise TypeError(f"no bound for {codec}")


def blockwise_bound(codec: BlockwiseQuantization, tensor: torch.Tensor) -> torch.Tensor:
    limits = torch.finfo(tensor.dtype)
    flat = tensor.double().flatten().abs()
    largest = torch.cat([block.max().expand(len(block)) for block in flat.split(codec.block_size)])
    rounding = 4 * limits.eps * largest + 4 * limits.tiny * limits.eps
    highest = 127 if codec.bits == 8 else 7
    if codec.code == "linear":
        return (largest / (2 * highest) + rounding).reshape(tensor.shape)
    return (flat.sqrt() * largest.sqrt() / highest + largest / (4 * highest**2) + rounding).reshape(tensor.shape)


def received(message: TensorMessage) -> TensorMessage:
    """The message as it arrives: all buffers concatenated."""
    return TensorMessage(message.header, (bytearray(b"".join(bytes(piece) for piece in message.payload)),))


def restore(codec: CompressionBase, tensor: torch.Tensor, info: CompressionInfo | None = None) -> torch.Tensor:
    """There and back again."""
    return codec.extract(received(codec.compress(tensor, info)))
