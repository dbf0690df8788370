"""Eight or four bits per element, and for each block of elements its largest magnitude."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch

from swarmcli.compression.base import TensorDescriptor, all_finite, read_numbers, tensor_memory
from swarmcli.compression.numeric import FloatCodec, keep_within_, not_finite, tiles, working_type
from swarmcli.errors import CompressionError
from swarmcli.network.transports.base import Buffer

Code = Literal["dynamic", "linear"]

MIN_BLOCK, MAX_BLOCK = 16, 1 << 20  # elements


class BlockwiseQuantization(FloatCodec):
    """Codes of few bits relative to the largest magnitude of their block (after arXiv 2110.02861, section 2.1).

    `bits` per element and one number per block, in float32 (float64 for float64 tensors). Blocks run along the
    flattened tensor, so an outlier makes only its own block coarser. Zeros stay zeros.

    Payload: the largest magnitude m of each block, then a signed code k per element, which stands for k/h·m (linear)
    or sign(k)·(k/h)²·m (dynamic); of two codes in a byte the first is in the lower half.

    bits         8: codes from −127 to 127, h = 127; 4: from −7 to 7, h = 7
    block_size   elements per block
    code         linear: equal steps. Error per element: at most m / 2h, m being the largest magnitude in its block.
                 dynamic: steps that grow with the square root of the magnitude, so that small elements keep more of
                 their digits. Error per element x: at most √(|x|·m) / h + m / 4h².

    On top of that comes rounding, at most 4 eps of the tensor's type times m. NaN and infinity are refused
    (CompressionError).
    """

    by_content = True

    def __init__(self, block_size: int = 4096, code: Code = "dynamic", bits: int = 8) -> None:
        if not (isinstance(block_size, int) and MIN_BLOCK <= block_size <= MAX_BLOCK):
            raise ValueError(f"block_size must be {MIN_BLOCK} to {MAX_BLOCK} elements, got {block_size!r}")
        if code not in get_args(Code):
            raise ValueError(f'code must be "dynamic" or "linear", got {code!r}')
        if bits not in (8, 4):
            raise ValueError(f"bits must be 8 or 4, got {bits!r}")
        self.block_size, self.code, self.bits = block_size, code, bits
        self.name = f"blockwise_{bits}bit/{block_size}/{code}"
        self._highest = (1 << (bits - 1)) - 1  # codes go from minus this to this, so that zero is among them

    @classmethod
    def named(cls, name: str) -> BlockwiseQuantization:
        """The codec whose name this is. Raises ValueError for any other text."""
        family, size, code = name.split("/")
        bits = 4 if family == "blockwise_4bit" else 8
        codec = cls(int(size), code, bits)  # type: ignore[arg-type]  # it is checked
        if codec.name != name:
            raise ValueError(f"no blockwise codec has the name {name!r}")
        return codec

    def _encode(self, tensor: torch.Tensor) -> Sequence[Buffer]:
        values = tensor.to(working_type(tensor.dtype)).reshape(-1)
        scales = torch.cat([block.abs().amax(dim=1) for block, _ in self._blocks(values, None)])
        if not all_finite(scales):
            raise not_finite(self.name)
        codes = torch.empty(values.numel(), dtype=torch.int8)
        for (block, scale), (target, _) in zip(self._blocks(values, scales), self._blocks(codes, None), strict=True):
            for row, column in tiles(block):
                target[row, column] = self._quantize(block[row, column], scale[row])
        return tensor_memory(scales), tensor_memory(codes if self.bits == 8 else pack_nibbles(codes))

    def _quantize(self, block: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """(blocks, elements) and (blocks, 1), or part of it: whole numbers up to the highest code."""
        divisor = torch.where(scale > 0, scale, 1.0)
        if self.code == "linear":
            return (block / divisor).mul_(self._highest).round_()
        # Roots before the division: quotients and products of the smallest numbers would lose digits, roots do not.
        return block.abs().sqrt_().mul_(self._highest / divisor.sqrt()).round_().copysign_(block)

    def _decode(self, payload: Buffer, descriptor: TensorDescriptor, values: torch.Tensor) -> None:
        count = self._count(descriptor)
        scales = read_numbers(payload, values.dtype, count)
        sent = -(-descriptor.numel * self.bits // 8)
        codes = read_numbers(payload, torch.int8, sent, count * values.dtype.itemsize)
        if self.bits == 4:
            codes = unpack_nibbles(codes)[: descriptor.numel]
        largest = float(scales.max())
        if not (float(scales.min()) >= 0 and largest <= torch.finfo(descriptor.dtype).max):
            raise CompressionError("a block whose largest magnitude is negative or not finite")
        if int(codes.min()) < -self._highest:
            raise CompressionError(f"code {int(codes.min())} is none of −{self._highest} to {self._highest}")
        values.copy_(codes)
        for block, scale in self._blocks(values, scales):
            for row, column in tiles(block):
                self._restore_(block[row, column], scale[row])
        keep_within_(values, descriptor.dtype, largest)

    def _restore_(self, block: torch.Tensor, scale: torch.Tensor) -> None:
        # One operation at a time: fused ones round differently on unlike processors, and all members need equal bits.
        if self.code == "linear":
            block.div_(self._highest).mul_(scale)
        else:
            block.mul_(scale.sqrt().div_(self._highest)).mul_(block.abs())

    def _size(self, descriptor: TensorDescriptor) -> int:
        scales = self._count(descriptor) * working_type(descriptor.dtype).itemsize
        return scales + -(-descriptor.numel * self.bits // 8)

    def _count(self, descriptor: TensorDescriptor) -> int:
        return -(-descriptor.numel // self.block_size)

    def _blocks(self, flat: torch.Tensor, scales: torch.Tensor | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """All whole blocks as (blocks, elements), then the shorter one at the end, each with its scales (blocks, 1)."""
        whole = flat.numel() // self.block_size
        numbers = torch.empty(0) if scales is None else scales.unsqueeze(1)
        if whole:
            yield flat[: whole * self.block_size].view(whole, self.block_size), numbers[:whole]
        if whole * self.block_size < flat.numel():
            yield flat[whole * self.block_size :].unsqueeze(0), numbers[whole:]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Two codes of 4 bits in a byte, the first one in its lower half."""
    pairs = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(-1, 2)
    return pairs[:, 0] & 15 | pairs[:, 1] << 4


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The codes in these bytes, and one more zero at the end if their number was odd."""
    return torch.stack((packed << 4 >> 4, packed >> 4), dim=1).reshape(-1)
