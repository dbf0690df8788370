"""Finds the codec that a message names."""

from __future__ import annotations

import torch

from swarmcli.compression.base import CompressionBase, NoCompression, TensorMessage
from swarmcli.compression.floats import Float16Compression
from swarmcli.errors import CompressionError

_CODECS: dict[str, CompressionBase] = {codec.name: codec for codec in (NoCompression(), Float16Compression())}


def codec_named(name: str) -> CompressionBase:
    """Raises CompressionError for a name that no codec has."""
    codec = _CODECS.get(name)
    if codec is None:
        raise CompressionError(f"unknown codec {name[:40]!r}")
    return codec


def extract(message: TensorMessage, out: torch.Tensor | None = None) -> torch.Tensor:
    """Decodes a message with the codec that it names. Raises CompressionError."""
    return codec_named(message.header.codec).extract(message, out)
