"""Finds the codec that a message names."""

from __future__ import annotations

import torch

from swarmcli.compression.base import CompressionBase, NoCompression, TensorMessage
from swarmcli.compression.blockwise import BlockwiseQuantization
from swarmcli.compression.floats import BFloat16Compression, Float16Compression, ScaledFloat16Compression
from swarmcli.compression.quantization import Quantile8BitQuantization, Uniform8BitQuantization
from swarmcli.errors import CompressionError

MAX_NAME = 40  # characters of a codec's name

_CODECS: dict[str, CompressionBase] = {
    codec.name: codec
    for codec in (
        NoCompression(),
        Float16Compression(),
        BFloat16Compression(),
        ScaledFloat16Compression(),
        Uniform8BitQuantization(),
        Quantile8BitQuantization(),
    )
}


def codec_named(name: str) -> CompressionBase:
    """Raises CompressionError for a name that no codec has."""
    codec = _CODECS.get(name)
    if codec is None:
        try:
            codec = BlockwiseQuantization.named(name[: MAX_NAME + 1])
        except ValueError as error:
            raise CompressionError(f"unknown codec {name[:MAX_NAME]!r}") from error
    return codec


def extract(message: TensorMessage, out: torch.Tensor | None = None) -> torch.Tensor:
    """Decodes a message with the codec that it names. Raises CompressionError."""
    return codec_named(message.header.codec).extract(message, out)
