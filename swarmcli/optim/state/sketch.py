"""A few numbers from which the distance between two copies of a state can be told.

A signed count-sketch (Charikar, Chen, Farach-Colton 2002, "Finding frequent items in data streams"): element i is
added with a random sign to a random one of 64 buckets. It is linear, so sketch(a) - sketch(b) = sketch(a - b), and the
expected square of its length is that of the vector. With 64 buckets the length is off by a tenth, usually.

One random draw per element would cost more than everything else, so the draws are shared and still pairwise
independent: a row of 4096 neighbours has fixed signs, 16 rows of them, and lies over the buckets in order; each
row has a sign and a first bucket of its own. Signs and buckets follow from the seed by SHAKE-256, equally everywhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

BUCKETS = 64
SKETCH_BYTES = 4 * BUCKETS
_ROW = 64 * BUCKETS  # elements
_ROWS = 16  # with signs of their own, then the same again
_SLAB = _ROWS * _ROW  # elements that are taken at a time: half a megabyte in float64 stays in the cache


@dataclass(frozen=True, slots=True)
class Sketch:
    """`values` (BUCKETS,), as they travel: float32, since what is compared differs by a thousandth or more."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.values) != BUCKETS:
            raise ValueError(f"a sketch has {BUCKETS} values, got {len(self.values)}")

    @classmethod
    def from_bytes(cls, data: bytes) -> Sketch:
        """Raises ValueError for another number of bytes."""
        if len(data) != SKETCH_BYTES:
            raise ValueError(f"a sketch has {SKETCH_BYTES} bytes, got {len(data)}")
        return cls(tuple(np.frombuffer(data, "<f4").tolist()))

    def to_bytes(self) -> bytes:
        """BUCKETS times float32, little endian."""
        return np.asarray(self.values, "<f4").tobytes()

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.values))

    @property
    def norm(self) -> float:
        """An estimate of the length of what was sketched."""
        return _length(self.values)

    def distance(self, other: Sketch) -> float:
        """An estimate of the distance between what was sketched here and there, with one seed."""
        return _length(here - there for here, there in zip(self.values, other.values, strict=True))


def _length(values: Iterable[float]) -> float:
    """Euclidean. One rounded operation after the other: the order within a library's sums, and whether it fuses a
    product with a sum, differ between processors, and all members of a group have to find the same distances."""
    total = 0.0
    for value in values:
        total += value * value
    return math.sqrt(total)


class Sketcher:
    """Sketches lists of tensors. Only sketches of one seed and of tensors in the same order compare."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        bits = np.unpackbits(np.frombuffer(self._draw(b"signs", _SLAB // 8), np.uint8))
        self._signs = torch.from_numpy(1.0 - 2.0 * bits).view(_ROWS, _ROW // BUCKETS, BUCKETS)

    @torch.no_grad()
    def sketch(self, tensors: Sequence[torch.Tensor]) -> Sketch:
        """Of floating-point tensors on any device; sums are taken in float64. Not finite where a tensor is not."""
        sums = torch.zeros(BUCKETS, dtype=torch.float64)
        for index, tensor in enumerate(tensors):
            rows = self._rows(tensor.detach().reshape(-1))
            self._scatter(rows, self._draw(index.to_bytes(4, "big"), len(rows)), sums)
        with np.errstate(over="ignore"):  # a sum beyond float32 is as good as infinite
            return Sketch(tuple(sums.numpy().astype("<f4").tolist()))

    def _rows(self, flat: torch.Tensor) -> torch.Tensor:
        """(rows, BUCKETS): each row of elements with its signs, summed by bucket but not yet turned to its own."""
        signs = self._signs.to(flat.device)
        rows = torch.empty(math.ceil(flat.numel() / _ROW), BUCKETS, dtype=torch.float64, device=flat.device)
        slab = torch.empty(_SLAB, dtype=torch.float64, device=flat.device)
        for row, start in zip(range(0, len(rows), _ROWS), range(0, flat.numel(), _SLAB), strict=True):
            piece = flat[start : start + _SLAB]
            count = math.ceil(len(piece) / _ROW)
            slab[: len(piece)].copy_(piece)
            slab[len(piece) : count * _ROW].zero_()
            part = slab[: count * _ROW].view(count, _ROW // BUCKETS, BUCKETS)
            torch.sum(part.mul_(signs[:count]), 1, out=rows[row : row + count])
        return rows.cpu()

    @staticmethod
    def _scatter(rows: torch.Tensor, draws: bytes, sums: torch.Tensor) -> None:
        drawn = torch.frombuffer(bytearray(draws), dtype=torch.uint8).long() if draws else torch.empty(0).long()
        signed = rows * (1 - (drawn & BUCKETS) // (BUCKETS // 2))[:, None]
        buckets = (torch.arange(BUCKETS) + drawn[:, None]) % BUCKETS
        sums.scatter_add_(0, buckets.reshape(-1), signed.reshape(-1))

    def _draw(self, purpose: bytes, count: int) -> bytes:
        return hashlib.shake_256(b"swarm sketch" + self._seed + purpose).digest(count)
