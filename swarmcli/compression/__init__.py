"""How a tensor becomes bytes and comes back."""

from swarmcli.compression.base import (
    CompressionBase,
    CompressionInfo,
    NoCompression,
    TensorDescriptor,
    TensorHeader,
    TensorMessage,
    TensorRole,
)
from swarmcli.compression.floats import Float16Compression
from swarmcli.compression.registry import codec_named, extract

__all__ = [
    "CompressionBase",
    "CompressionInfo",
    "Float16Compression",
    "NoCompression",
    "TensorDescriptor",
    "TensorHeader",
    "TensorMessage",
    "TensorRole",
    "codec_named",
    "extract",
]
