"""Codecs that send one byte per element: the number of one of 256 levels that the tensor has."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from swarmcli.compression.base import TensorDescriptor, all_finite, read_numbers, tensor_memory
from swarmcli.compression.numeric import FloatCodec, keep_within_, not_finite, smallest, tiles, working_type
from swarmcli.errors import CompressionError
from swarmcli.network.transports.base import Buffer

_LEVELS = 256
_MIDDLE = 127.5  # of the levels' numbers, 0 to 255


class Uniform8BitQuantization(FloatCodec):
    """256 levels at equal distances from the smallest to the largest element: 1 byte per element and two numbers.

    Payload: the centre c and the step s, then a byte b per element: c + (b − 127.5)·s.

    Error per element: at most (max − min) / 510, and on top of that rounding, at most 4 eps of the tensor's type times
    its largest magnitude. A single outlier makes all levels coarser: BlockwiseQuantization suffers less from that.
    NaN and infinity are refused (CompressionError).
    """

    name = "uniform_8bit"
    by_content = True

    def _encode(self, tensor: torch.Tensor) -> Sequence[Buffer]:
        values, work = tensor.reshape(1, -1), working_type(tensor.dtype)
        centre, step = self._grid(*_extremes(values, self.name), work)
        numbers = torch.empty(values.shape, dtype=torch.uint8)
        for tile in tiles(values):
            # From 0 to 255 at the extremes; adding a half turns cutting off into rounding.
            numbers[tile] = (values[tile].to(work) - centre).div_(step if step > 0 else 1.0).add_(_MIDDLE + 0.5)
        return tensor_memory(torch.tensor([centre, step], dtype=work)), tensor_memory(numbers)

    @staticmethod
    def _grid(least: float, most: float, dtype: torch.dtype) -> tuple[float, float]:
        """The middle of the levels and their distance, as numbers of `dtype`."""
        centre = float(torch.tensor(least / 2 + most / 2 if least < most else least, dtype=dtype))
        step = float(torch.tensor(max(most - centre, centre - least) / _MIDDLE, dtype=dtype))
        if least == most:
            return centre, 0.0
        # Rounded up, so that no element lies beyond the last level.
        return centre, float(torch.tensor(step * (1 + torch.finfo(dtype).eps) + smallest(dtype), dtype=dtype))

    def _decode(self, payload: Buffer, descriptor: TensorDescriptor, values: torch.Tensor) -> None:
        centre, step = read_numbers(payload, values.dtype, 2).tolist()
        reach = abs(centre) + _MIDDLE * step  # not finite if one of the two is not
        if not (step >= 0 and reach <= 1.01 * torch.finfo(descriptor.dtype).max):
            raise CompressionError(f"impossible levels: {centre} ± {_MIDDLE * step}")
        values.copy_(read_numbers(payload, torch.uint8, descriptor.numel, 2 * values.dtype.itemsize))
        # One operation at a time: fused ones round differently on unlike processors, and all members need equal bits.
        values.sub_(_MIDDLE).mul_(step).add_(centre)
        keep_within_(values, descriptor.dtype, reach)

    def _size(self, descriptor: TensorDescriptor) -> int:
        return 2 * working_type(descriptor.dtype).itemsize + descriptor.numel


class Quantile8BitQuantization(FloatCodec):
    """256 levels where the elements are: most of them at quantiles, the others at equal distances over the range.

    1 byte per element, the number of its level, and before them the levels themselves in ascending order, as many as
    there are elements but at most 256. Quantiles are those of up to 16384 elements from all over the tensor.

    Error per element: at most (max − min) / 112, where elements are rare; where they are dense the levels are too. A
    tensor of at most 256 elements comes back as it was. NaN and infinity are refused (CompressionError).
    """

    name = "quantile_8bit"
    by_content = True

    def _encode(self, tensor: torch.Tensor) -> Sequence[Buffer]:
        values = tensor.to(working_type(tensor.dtype)).reshape(-1)
        least, most = _extremes(values, self.name)
        levels = _choose_levels(values, least, most)
        borders = levels if values.numel() <= _LEVELS else levels[:-1] / 2 + levels[1:] / 2
        numbers = torch.empty(values.numel(), dtype=torch.uint8)
        for _, part in tiles(values.unsqueeze(0)):
            numbers[part] = torch.bucketize(values[part], borders, out_int32=True).to(torch.uint8)
        return tensor_memory(levels), tensor_memory(numbers)

    def _decode(self, payload: Buffer, descriptor: TensorDescriptor, values: torch.Tensor) -> None:
        count = min(_LEVELS, descriptor.numel)
        levels = read_numbers(payload, values.dtype, count)
        numbers = read_numbers(payload, torch.uint8, descriptor.numel, count * values.dtype.itemsize)
        if not all_finite(levels.to(descriptor.dtype)) or bool((levels[1:] < levels[:-1]).any()):
            raise CompressionError("levels that are not finite, or in no order")
        if count < _LEVELS and int(numbers.max()) >= count:
            raise CompressionError(f"level {int(numbers.max())} of {count}")
        for _, part in tiles(values.unsqueeze(0)):
            torch.index_select(levels, 0, numbers[part].to(torch.int32), out=values[part])

    def _size(self, descriptor: TensorDescriptor) -> int:
        return min(_LEVELS, descriptor.numel) * working_type(descriptor.dtype).itemsize + descriptor.numel


def _extremes(values: torch.Tensor, codec: str) -> tuple[float, float]:
    least, most = (float(extreme) for extreme in values.aminmax())
    if not (math.isfinite(least) and math.isfinite(most)):  # NaN would come out as both
        raise not_finite(codec)
    return least, most


# The levels of Quantile8BitQuantization.

_EVEN = 64  # levels at equal distances, the extremes among them; they bound the error
_SAMPLE = 16384  # elements


def _choose_levels(values: torch.Tensor, least: float, most: float) -> torch.Tensor:
    """(levels,) in ascending order, from the least to the most."""
    count = values.numel()
    if count <= _LEVELS:
        return values.sort().values
    stride = count // _SAMPLE | 1 if count > _SAMPLE else 1  # odd: rows of a matrix mostly have even lengths
    sample = np.sort(values[::stride].numpy())
    inner = np.linspace(0, len(sample) - 1, _LEVELS - _EVEN + 2)[1:-1].astype(np.int64)
    position = torch.linspace(0, 1, _EVEN, dtype=values.dtype)
    even = least * (1 - position) + most * position  # as a difference the range might be infinite
    return torch.cat((even, torch.from_numpy(sample[inner]))).clamp_(least, most).sort().values
