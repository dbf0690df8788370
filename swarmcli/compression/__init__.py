"""How a tensor becomes bytes and comes back."""

from swarmcli.compression.adaptive import (
    AdaptiveCompressionBase,
    PerTensorCompression,
    RoleAdaptiveCompression,
    SizeAdaptiveCompression,
    codec_named,
    extract,
)
from swarmcli.compression.base import (
    CompressionBase,
    CompressionInfo,
    NoCompression,
    TensorDescriptor,
    TensorHeader,
    TensorMessage,
    TensorRole,
)
from swarmcli.compression.blockwise import BlockwiseQuantization
from swarmcli.compression.floats import BFloat16Compression, Float16Compression, ScaledFloat16Compression
from swarmcli.compression.quantization import Quantile8BitQuantization, Uniform8BitQuantization
from swarmcli.compression.sparse import NonzeroQuantization, TopK

__all__ = [
    "AdaptiveCompressionBase",
    "BFloat16Compression",
    "BlockwiseQuantization",
    "CompressionBase",
    "CompressionInfo",
    "Float16Compression",
    "NoCompression",
    "NonzeroQuantization",
    "PerTensorCompression",
    "Quantile8BitQuantization",
    "RoleAdaptiveCompression",
    "ScaledFloat16Compression",
    "SizeAdaptiveCompression",
    "TensorDescriptor",
    "TensorHeader",
    "TensorMessage",
    "TensorRole",
    "TopK",
    "Uniform8BitQuantization",
    "codec_named",
    "extract",
]
