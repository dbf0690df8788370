"""Choosing codecs: for a tensor by its size, its role or its key, and for a message by the name in its header."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch

from swarmcli.compression.base import (
    CompressionBase,
    CompressionInfo,
    NoCompression,
    TensorDescriptor,
    TensorMessage,
    TensorRole,
)
from swarmcli.compression.blockwise import BlockwiseQuantization
from swarmcli.compression.floats import BFloat16Compression, Float16Compression, ScaledFloat16Compression
from swarmcli.compression.quantization import Quantile8BitQuantization, Uniform8BitQuantization
from swarmcli.compression.sparse import NonzeroQuantization, TopK
from swarmcli.errors import CompressionError


class AdaptiveCompressionBase(CompressionBase):
    """Chooses a codec for each tensor; that codec's error bound holds. Messages name the chosen codec.

    For codecs of one's own: `choose_compression` and `choices` are all that they need. Peers that average together
    compare the codec of each tensor, so all have to choose alike. Without `info`, `compress` chooses by the tensor
    alone, without key and role.
    """

    def __init_subclass__(cls) -> None:
        if own := {"compress", "extract"} & vars(cls).keys():
            raise TypeError(f"{cls.__name__}.{min(own)} would not be called; derive the codec from CompressionBase")

    name = "adaptive"  # in `description`, for people; messages name the codec that was chosen

    @abstractmethod
    def choose_compression(self, info: CompressionInfo) -> CompressionBase:
        """The codec for a tensor. Raises ValueError if there is none for it."""

    @abstractmethod
    def choices(self) -> Iterable[CompressionBase]:
        """All codecs that may be chosen: `extract` reads their messages, and they bound the payload."""

    def codec_for(self, info: CompressionInfo) -> CompressionBase:
        return self.choose_compression(info).codec_for(info)

    def compress(self, tensor: torch.Tensor, info: CompressionInfo | None = None) -> TensorMessage:
        info = CompressionInfo.of(tensor) if info is None else info
        return self.codec_for(info).compress(tensor, info)

    def extract(self, message: TensorMessage, out: torch.Tensor | None = None) -> torch.Tensor:
        """Decodes what any of the choices may have encoded. Raises CompressionError for other codecs' messages."""
        for codec in self._leaves():
            if codec.name == message.header.codec:
                return codec.extract(message, out)
        raise CompressionError(f"expected a codec of {self.description}, got {message.header.codec[:40]!r}")

    def payload_bound(self, descriptor: TensorDescriptor) -> int:
        return max((codec.payload_bound(descriptor) for codec in self.choices()), default=descriptor.nbytes)

    def _leaves(self) -> Iterable[CompressionBase]:
        """The codecs at the ends of all choices; and NoCompression, for tensors that a codec does not handle."""
        for choice in self.choices():
            if isinstance(choice, AdaptiveCompressionBase):
                yield from choice._leaves()
            else:
                yield choice
        yield NoCompression()


class SizeAdaptiveCompression(AdaptiveCompressionBase):
    """One codec for tensors of fewer than `threshold` elements, another for those of as many or more."""

    name = "size_adaptive"

    def __init__(self, threshold: int, less: CompressionBase, greater_equal: CompressionBase) -> None:
        if not threshold >= 0:
            raise ValueError(f"threshold must be a number of elements, got {threshold!r}")
        self.threshold, self.less, self.greater_equal = (
            threshold,
            _codec("less", less),
            _codec("greater_equal", greater_equal),
        )

    @property
    def description(self) -> str:
        return f"{self.name}({self.threshold}, {self.less.description}, {self.greater_equal.description})"

    def choose_compression(self, info: CompressionInfo) -> CompressionBase:
        return self.less if info.descriptor.numel < self.threshold else self.greater_equal

    def choices(self) -> Iterable[CompressionBase]:
        return self.less, self.greater_equal


class RoleAdaptiveCompression(AdaptiveCompressionBase):
    """A codec for each role that a tensor may have; `default` for the other roles and for tensors without one."""

    name = "role_adaptive"

    def __init__(
        self,
        *,
        activation: CompressionBase | None = None,
        parameter: CompressionBase | None = None,
        gradient: CompressionBase | None = None,
        optimizer: CompressionBase | None = None,
        default: CompressionBase | None = None,
    ) -> None:
        """`default` is no compression unless given."""
        self.default = NoCompression() if default is None else _codec("default", default)
        given = {
            TensorRole.ACTIVATION: activation,
            TensorRole.PARAMETER: parameter,
            TensorRole.GRADIENT: gradient,
            TensorRole.OPTIMIZER: optimizer,
        }
        self._by_role = {role: _codec(role.value, codec) for role, codec in given.items() if codec is not None}

    @property
    def description(self) -> str:
        roles = "".join(f"{role.value}={codec.description}, " for role, codec in self._by_role.items())
        return f"{self.name}({roles}default={self.default.description})"

    def choose_compression(self, info: CompressionInfo) -> CompressionBase:
        return self._by_role.get(info.role, self.default)

    def choices(self) -> Iterable[CompressionBase]:
        return *self._by_role.values(), self.default


class PerTensorCompression(AdaptiveCompressionBase):
    """A codec for each tensor by its key: an index into a sequence, or whatever a mapping's keys are."""

    name = "per_tensor"

    def __init__(self, tensor_compressions: Sequence[CompressionBase] | Mapping[int | str, CompressionBase]) -> None:
        items = (
            tensor_compressions.items() if isinstance(tensor_compressions, Mapping) else enumerate(tensor_compressions)
        )
        self._by_key = {key: _codec(f"tensor_compressions[{key!r}]", codec) for key, codec in items}

    @property
    def description(self) -> str:
        keys = sorted(self._by_key, key=lambda key: (isinstance(key, str), key))
        return f"{self.name}({', '.join(f'{key!r}: {self._by_key[key].description}' for key in keys)})"

    def choose_compression(self, info: CompressionInfo) -> CompressionBase:
        codec = None if info.key is None else self._by_key.get(info.key)
        if codec is None:
            raise ValueError(f"{self.name}: there is no codec for a tensor with the key {info.key!r}")
        return codec

    def choices(self) -> Iterable[CompressionBase]:
        return self._by_key.values()


def _codec(name: str, codec: object) -> CompressionBase:
    """Raises TypeError for anything but a codec: a class instead of an instance of it is a common slip."""
    if not isinstance(codec, CompressionBase):
        raise TypeError(f"{name} must be a codec such as Float16Compression(), got {codec!r}")
    return codec


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
        NonzeroQuantization(),
    )
}


def codec_named(name: str) -> CompressionBase:
    """Raises CompressionError for a name that no codec has."""
    codec = _CODECS.get(name)
    if codec is None:
        try:
            parametric = TopK if name.startswith("topk/") else BlockwiseQuantization
            codec = parametric.named(name[: MAX_NAME + 1])
        except ValueError as error:
            raise CompressionError(f"unknown codec {name[:MAX_NAME]!r}") from error
    return codec


def extract(message: TensorMessage, out: torch.Tensor | None = None) -> torch.Tensor:
    """Decodes a message with the codec that it names. Raises CompressionError.

    Without `out` the result requires a gradient if the tensor that was compressed did.
    """
    tensor = codec_named(message.header.codec).extract(message, out)
    wanted = message.header.requires_grad and out is None and (tensor.is_floating_point() or tensor.is_complex())
    return tensor.requires_grad_() if wanted else tensor
