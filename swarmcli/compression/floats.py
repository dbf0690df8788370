"""Codecs that send floating point numbers as shorter floating point numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from swarmcli.compression.base import TensorDescriptor, all_finite, read_numbers, tensor_memory
from swarmcli.compression.numeric import FloatCodec, keep_within_, not_finite, smallest, tiles, working_type
from swarmcli.errors import CompressionError
from swarmcli.network.transports.base import Buffer

_SHORTEST_ROW = 64  # numbers that share a mean and a deviation, which take 8 bytes


class _SixteenBits(FloatCodec):
    """Two bytes per element. Tensors of 16-bit types travel unchanged: encoded they would be no smaller."""

    def handles(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize > 2


class _Shorter(_SixteenBits):
    """Each element rounded to a shorter type."""

    _type: ClassVar[torch.dtype]

    def _encode(self, tensor: torch.Tensor) -> Sequence[Buffer]:
        return (tensor_memory(_shorten(tensor, self._type)),)

    def _decode(self, payload: Buffer, descriptor: TensorDescriptor, values: torch.Tensor) -> None:
        values.copy_(read_numbers(payload, self._type, descriptor.numel))

    def _size(self, descriptor: TensorDescriptor) -> int:
        return descriptor.numel * self._type.itemsize


class Float16Compression(_Shorter):
    """IEEE half precision: 2 bytes per element; 16-bit tensors travel unchanged.

    Error per element: at most 2⁻¹¹ of its magnitude, or 2⁻²⁵ near zero. Finite values beyond ±65504 are clipped;
    infinities and NaN stay what they are.
    """

    name = "float16"
    _type = torch.float16


class BFloat16Compression(_Shorter):
    """bfloat16, which has the range of float32: 2 bytes per element; 16-bit tensors travel unchanged.

    Error per element: at most 2⁻⁸ of its magnitude, or 2⁻¹³⁴ near zero. Finite values beyond ±3.39e38 are clipped;
    infinities and NaN stay what they are.
    """

    name = "bfloat16"
    _type = torch.bfloat16


class ScaledFloat16Compression(_SixteenBits):
    """Half precision of what is left when each row's mean is taken off and its deviation divided out.

    2 bytes per element and two numbers per row, in float32 (float64 for float64 tensors); 16-bit tensors travel
    unchanged. Rows run along the last dimension, if that has at least 64 elements; otherwise the whole tensor is one.
    Payload: all means, all deviations, the elements as float16: (x − mean) / deviation.

    Error per element: at most 2⁻¹¹ of its distance from the row's mean plus 2⁻²⁴ of the row's standard deviation, and
    on top of that rounding, at most 4 eps of the tensor's type times the row's largest magnitude. So numbers far too
    small or too large for half precision keep their digits. (A row whose sum is beyond the type's range counts as one
    with the mean 0.) NaN and infinity are refused (CompressionError).
    """

    name = "scaled_float16"
    by_content = True

    def _encode(self, tensor: torch.Tensor) -> Sequence[Buffer]:
        rows = tensor.reshape(_rows(TensorDescriptor.of(tensor)))  # (rows, elements)
        means = rows.mean(dim=1, keepdim=True)
        if not all_finite(furthest := _furthest(rows, means)):
            # A sum or a difference is beyond the type's range, or an element is not finite.
            means = torch.where(furthest.isfinite(), means, 0.0)
            if not all_finite(furthest := _furthest(rows, means)):
                raise not_finite(self.name)
        scales = _standard_deviations(rows, means, furthest)
        halves = torch.empty(rows.shape, dtype=torch.float16)
        for row, column in tiles(rows):
            scale = scales[row]
            halves[row, column] = (rows[row, column] - means[row]).div_(torch.where(scale > 0, scale, 1.0))
        return tensor_memory(torch.cat((means, scales))), tensor_memory(halves)

    def _decode(self, payload: Buffer, descriptor: TensorDescriptor, values: torch.Tensor) -> None:
        rows, width = _rows(descriptor)
        means, scales = read_numbers(payload, values.dtype, 2 * rows).view(2, rows, 1)
        halves = read_numbers(payload, torch.float16, descriptor.numel, 2 * rows * values.dtype.itemsize)
        limit = torch.finfo(descriptor.dtype).max
        if not (all_finite(means) and all_finite(scales) and all_finite(halves)):
            raise CompressionError("a mean, a deviation or an element that is not finite")
        if not 0 <= float(scales.min()) <= float(scales.max()) <= limit:
            raise CompressionError("a negative deviation")
        values.copy_(halves)
        values.view(rows, width).mul_(scales).add_(means)
        largest = float(means.abs().max()) + float(scales.max()) * torch.finfo(torch.float16).max
        keep_within_(values, descriptor.dtype, largest)

    def _size(self, descriptor: TensorDescriptor) -> int:
        rows, _ = _rows(descriptor)
        return 2 * rows * working_type(descriptor.dtype).itemsize + 2 * descriptor.numel


def _rows(descriptor: TensorDescriptor) -> tuple[int, int]:
    """How many rows of how many elements have a mean and a deviation of their own."""
    width = descriptor.shape[-1] if descriptor.shape else 1
    return (descriptor.numel // width, width) if width >= _SHORTEST_ROW else (1, descriptor.numel)


def _furthest(rows: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """(rows, 1): the largest distance from the mean in each row; not finite if an element is not."""
    return torch.maximum(rows.amax(dim=1, keepdim=True) - means, means - rows.amin(dim=1, keepdim=True))


def _standard_deviations(rows: torch.Tensor, means: torch.Tensor, furthest: torch.Tensor) -> torch.Tensor:
    """(rows, 1), so large that everything divided by it is within the range of half precision."""
    unit = torch.where(furthest > 0, furthest, 1.0)
    squares = torch.zeros_like(furthest)
    for row, column in tiles(rows):
        # Squares of very large and very small numbers are beyond the range of their type, those of quotients are not.
        quotients = (rows[row, column] - means[row]).div_(unit[row])
        squares[row] += quotients.square_().sum(dim=1, keepdim=True)
    relative = squares.div_(rows.shape[1]).sqrt_().clamp_(min=2.0**-15)
    return torch.where(furthest > 0, (furthest * relative).clamp_(min=smallest(furthest.dtype)), 0.0)


def _shorten(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds to a type of smaller range; numbers beyond that range are put at its end."""
    short = tensor.to(dtype)
    if all_finite(short):
        return short
    limit = torch.finfo(dtype).max
    return torch.where(torch.isinf(tensor), short, tensor.clamp(-limit, limit).to(dtype))
