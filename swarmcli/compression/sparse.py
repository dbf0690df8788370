"""Codecs for few of a tensor's elements: the largest of each chunk in few bits, and averages of such messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from swarmcli.compression.base import (
    CompressionBase,
    CompressionInfo,
    NoCompression,
    TensorDescriptor,
    TensorHeader,
    TensorMessage,
    check_header,
    payload_memory,
    read_numbers,
    tensor_memory,
)
from swarmcli.compression.blockwise import BlockwiseQuantization, pack_nibbles, unpack_nibbles
from swarmcli.compression.numeric import FloatCodec, not_finite, working_type
from swarmcli.errors import CompressionError
from swarmcli.network.transports.base import Buffer

CHUNK = 4096  # elements
_COUNT = np.dtype("<u4")
_ROWS = 32  # chunks that are encoded at once: intermediate results stay in the cache


class NonzeroQuantization(CompressionBase):
    """The message of BlockwiseQuantization(4096, bits=4) with the codes that are not zero alone, and their places.

    For averages of TopK messages, which differ in how many elements are not zero. The error is that of
    BlockwiseQuantization; zeros stay zeros. Payload: one number per chunk, a count of 4 bytes, the places (see
    `_pack_places`), the codes, two in a byte. If that is not smaller, the payload is that of BlockwiseQuantization; a
    reader tells them apart by the size.
    """

    name = "nonzero_4bit"
    by_content = True
    chunk = CHUNK
    _dense = BlockwiseQuantization(CHUNK, bits=4)

    def codec_for(self, info: CompressionInfo) -> CompressionBase:
        return self if info.descriptor.dtype.is_floating_point else NoCompression()

    def payload_bound(self, descriptor: TensorDescriptor) -> int:
        return self._dense.payload_bound(descriptor)

    def payload_of(self, descriptor: TensorDescriptor, nonzero: int) -> int:
        """The largest payload in bytes of a tensor with at most so many elements that are not zero."""
        scales = -(-descriptor.numel // CHUNK) * working_type(descriptor.dtype).itemsize
        squeezed = scales + _COUNT.itemsize + _place_bytes(nonzero, descriptor.numel) + -(-nonzero // 2)
        return min(squeezed, self.payload_bound(descriptor))

    def compress(self, tensor: torch.Tensor, info: CompressionInfo | None = None) -> TensorMessage:
        if not tensor.is_floating_point():
            return NoCompression().compress(tensor, info)
        header = TensorHeader.of(self.name, tensor)
        dense = self._dense.compress(tensor)
        if not tensor.numel():
            return TensorMessage(header, ())
        scales, flat = dense.payload
        codes = unpack_nibbles(read_numbers(flat, torch.int8, len(flat)))[: tensor.numel()]
        places = codes.nonzero().flatten()
        count = np.array(len(places), _COUNT)
        packed = (_pack_places(places.numpy(), tensor.numel()), tensor_memory(pack_nibbles(codes[places])))
        message = TensorMessage(header, (scales, count.tobytes(), *packed))
        return message if message.payload_size < dense.payload_size else TensorMessage(header, dense.payload)

    def extract(self, message: TensorMessage, out: torch.Tensor | None = None) -> torch.Tensor:
        if not message.header.descriptor().dtype.is_floating_point:
            return NoCompression().extract(message, out)
        descriptor = check_header(message, self.name, out)
        payload, size = message.payload, message.payload_size
        if size < self.payload_bound(descriptor):
            payload = self._unsqueezed(message, descriptor, size)
        return self._dense.extract(TensorMessage(_renamed(message.header, self._dense.name), payload), out)

    def _unsqueezed(self, message: TensorMessage, descriptor: TensorDescriptor, size: int) -> Sequence[Buffer]:
        """The payload as BlockwiseQuantization writes it. Checks the count against the size before it allocates."""
        numel = descriptor.numel
        scales = -(-numel // CHUNK) * working_type(descriptor.dtype).itemsize
        if size < (head := scales + _COUNT.itemsize):
            raise CompressionError(f"expected a payload of at least {head} bytes, got {size}")
        memory = memoryview(payload_memory(message)).cast("B")
        count = int(np.frombuffer(memory[scales:head], _COUNT)[0])
        end = head + _place_bytes(count, numel)
        if count > numel or size != end + -(-count // 2):
            raise CompressionError(f"a payload of {size} bytes does not fit {count} elements that are not zero")
        codes = torch.zeros(numel, dtype=torch.int8)
        places = torch.from_numpy(_unpack_places(memory[head:end], count, numel))
        sent = unpack_nibbles(read_numbers(memory[end:], torch.int8, size - end))[:count]
        if not bool(sent.all()):
            raise CompressionError("a code of zero")
        codes[places] = sent
        return memory[:scales], tensor_memory(pack_nibbles(codes))


class TopK(FloatCodec):
    """The `k` elements of largest magnitude of each chunk of 4,096; the others become zero (arXiv 2508.15706).

    Chunks run along the flattened tensor; of equal magnitudes the one with the smaller index is kept. An element takes
    about 8 bits for its place (k = 64; see `_pack_places`) and `bits` for its sign and level, a chunk one float32 (1
    bit) or two. Levels are

    1 bit      the mean of all kept magnitudes
    2 bits     the means of the smaller half of them and of the larger half
    4, 8 bits  8 or 128 equal steps from the smallest kept magnitude to the largest; the nearest is taken

    Payload: the numbers of all chunks, the places, then for each element its level, with the sign as the lowest bit.
    Encoding what was decoded gives the same bits again, so a sender can know to the bit what others get.
    Tensors of float64 travel unchanged. NaN and infinity are refused (CompressionError). Averages travel as
    NonzeroQuantization.
    """

    by_content = True
    chunk = CHUNK

    def __init__(self, k: int = 64, bits: int = 2) -> None:
        if not (isinstance(k, int) and 32 <= k <= 256):
            raise ValueError(f"k must be 32 to 256 of {CHUNK} elements, got {k!r}")
        if bits not in (1, 2, 4, 8):
            raise ValueError(f"bits must be 1, 2, 4 or 8, got {bits!r}")
        self.k, self.bits = k, bits
        self.name = f"topk/{k}/{bits}"
        self._levels = 1 << (bits - 1)
        self._numbers = min(self._levels, 2)  # float32 per chunk

    @classmethod
    def named(cls, name: str) -> TopK:
        """The codec whose name this is. Raises ValueError for any other text."""
        family, k, bits = name.split("/")
        codec = cls(int(k), int(bits))
        if family != "topk" or codec.name != name:
            raise ValueError(f"no sparse codec has the name {name!r}")
        return codec

    @property
    def of_averages(self) -> CompressionBase:
        return NonzeroQuantization()

    def average_bound(self, descriptor: TensorDescriptor, senders: int) -> int:
        if not self.handles(descriptor.dtype):
            return descriptor.nbytes
        return NonzeroQuantization().payload_of(descriptor, min(descriptor.numel, senders * self.kept(descriptor)))

    def handles(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype is not torch.float64

    def _encode(self, tensor: torch.Tensor) -> Sequence[Buffer]:
        made = [self._chosen(rows, tensor.dtype) for rows in _chunks(tensor.reshape(-1))]
        numbers, places, codes = (
            torch.cat([each.reshape(-1) for each in column]) for column in zip(*made, strict=True)
        )
        starts = np.repeat(np.arange(len(numbers) // self._numbers) * CHUNK, self.k)[: len(places)]
        packed = _pack_places(starts + places.numpy(), tensor.numel())
        return tensor_memory(numbers), packed, self._pack_codes(codes.numpy())

    def _chosen(self, rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Numbers (rows, 1 or 2), places (rows, kept), and codes (rows, kept) with the sign as the lowest bit."""
        values = rows.float()
        if not bool(values.isfinite().all()):
            raise not_finite(self.name)
        # Bit patterns of magnitudes have the order of the numbers; with the place in the lowest bits no two are equal.
        keys = values.abs().view(torch.int32).long() << 12 | CHUNK - 1 - torch.arange(rows.shape[1])
        keys = keys.topk(min(self.k, rows.shape[1])).values
        places = CHUNK - 1 - (keys & CHUNK - 1)
        magnitudes = values.gather(1, places).abs()  # the largest first
        kept = magnitudes.shape[1]
        if self._levels <= 2:
            larger = kept - kept // 2 if self._levels == 2 else kept
            halves = [magnitudes[:, larger:] if larger < kept else magnitudes, magnitudes[:, :larger]]
            numbers = torch.cat([_mean(half) for half in halves[-self._levels :]], 1).to(dtype).float()
            levels = self._table(numbers, dtype)
            nearest = (torch.arange(kept) < larger).long().expand(places.shape) * (self._levels - 1)
        else:
            numbers = torch.cat([magnitudes[:, -1:], magnitudes[:, :1]], 1)
            levels = self._table(numbers, dtype)
            above = torch.searchsorted(levels, magnitudes).clamp_(max=self._levels - 1)
            below = (above - 1).clamp_(min=0)
            nearer = magnitudes - levels.gather(1, below) < levels.gather(1, above) - magnitudes
            nearest = torch.where(nearer, below, above)
        # searchsorted takes the first of equal levels, so equal values have equal codes.
        sent = levels.gather(1, nearest)
        # One code for zero: what is sent as zero has no sign.
        codes = torch.searchsorted(levels, sent) << 1 | ((values.gather(1, places) < 0) & (sent > 0)).long()
        places, order = places.sort(1)
        return numbers, places, codes.gather(1, order)

    def _table(self, numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The levels of chunks (rows, levels), in order, from their numbers (rows, 1 or 2)."""
        if self._levels <= 2:
            return numbers
        low, high = numbers[:, :1], numbers[:, 1:]
        # One operation at a time: fused ones round differently on unlike processors.
        steps = torch.arange(self._levels, dtype=torch.float32).div_(self._levels - 1)
        levels = (high - low).mul(steps).add_(low).to(dtype).float()
        levels[:, -1:] = high
        return torch.minimum(levels, high)

    def _decode(self, payload: Buffer, descriptor: TensorDescriptor, values: torch.Tensor) -> None:
        chunks, kept = -(-descriptor.numel // CHUNK), self.kept(descriptor)
        memory, head = memoryview(payload).cast("B"), 4 * self._numbers * chunks
        end = head + _place_bytes(kept, descriptor.numel)
        numbers = read_numbers(payload, torch.float32, self._numbers * chunks).view(chunks, -1)
        most = torch.finfo(descriptor.dtype).max
        if not bool(((numbers >= 0) & (numbers <= most) & (numbers[:, :1] <= numbers)).all()):
            raise CompressionError("levels that are negative, not finite or without order")
        places = torch.from_numpy(_unpack_places(memory[head:end], kept, descriptor.numel))
        places -= torch.arange(chunks).repeat_interleave(self.k)[:kept] * CHUNK
        if int(places.min()) < 0 or int(places.max()) >= CHUNK:
            raise CompressionError("places beyond their chunk")
        codes = torch.from_numpy(self._unpack_codes(memory[end:], kept))
        values.zero_()
        begin = row = 0
        for rows in _chunks(values):
            few = slice(begin, begin := begin + len(rows) * min(self.k, rows.shape[1]))
            self._fill(rows, numbers[row : (row := row + len(rows))], places[few], codes[few], descriptor.dtype)

    def _fill(
        self, rows: torch.Tensor, numbers: torch.Tensor, places: torch.Tensor, codes: torch.Tensor, dtype: torch.dtype
    ) -> None:
        places, codes = places.view(len(rows), -1), codes.view(len(rows), -1)
        magnitudes = self._table(numbers, dtype).gather(1, codes >> 1)
        rows.scatter_(1, places, torch.where(codes & 1 == 1, -magnitudes, magnitudes))

    def _pack_codes(self, codes: np.ndarray) -> bytes:
        each = 8 // self.bits
        padded = np.zeros((-(-len(codes) // each), each), np.int64)
        padded.reshape(-1)[: len(codes)] = codes
        return (padded << np.arange(each) * self.bits).sum(1).astype(np.uint8).tobytes()

    def _unpack_codes(self, memory: Buffer, count: int) -> np.ndarray:
        each = 8 // self.bits
        packed = np.frombuffer(memory, np.uint8).astype(np.int64)
        return (packed[:, None] >> np.arange(each) * self.bits & (1 << self.bits) - 1).reshape(-1)[:count]

    def kept(self, descriptor: TensorDescriptor) -> int:
        """How many elements of a tensor travel."""
        whole, rest = divmod(descriptor.numel, CHUNK)
        return whole * self.k + min(self.k, rest)

    def _size(self, descriptor: TensorDescriptor) -> int:
        chunks, kept = -(-descriptor.numel // CHUNK), self.kept(descriptor)
        return 4 * self._numbers * chunks + _place_bytes(kept, descriptor.numel) + -(-kept * self.bits // 8)


def _chunks(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Whole chunks as (rows, 4096), at most _ROWS at once, then the shorter one at the end."""
    whole = flat.numel() // CHUNK
    if whole:
        yield from flat[: whole * CHUNK].view(whole, CHUNK).split(_ROWS)
    if whole * CHUNK < flat.numel():
        yield flat[whole * CHUNK :].unsqueeze(0)


def _mean(magnitudes: torch.Tensor) -> torch.Tensor:
    # In float64 the sum of up to 256 equal numbers is exact; cumsum adds in the same order on all processors.
    return magnitudes.double().cumsum(1)[:, -1:].div_(magnitudes.shape[1])


def _renamed(header: TensorHeader, codec: str) -> TensorHeader:
    return TensorHeader(codec, header.dtype, header.shape, header.requires_grad)


def _low_bits(count: int, numel: int) -> int:
    return max(0, (numel // max(1, count)).bit_length() - 1)


def _place_bytes(count: int, numel: int) -> int:
    low = _low_bits(count, numel)
    return low * -(-count // 8) + -(-(count + (numel >> low) + 1) // 8)


def _pack_places(places: np.ndarray, numel: int) -> bytes:
    """Ascending places among `numel` in about 2 + log2(numel / count) bits each (Elias-Fano): first the lower bits, one
    plane per bit; then the upper bits in unary: for each place as many zeros as they have grown by, and a one."""
    low = _low_bits(len(places), numel)
    planes = [np.packbits(places >> bit & 1 == 1, bitorder="little") for bit in range(low)]
    upper = np.zeros(len(places) + (numel >> low) + 1, bool)
    upper[(places >> low) + np.arange(len(places))] = True
    return b"".join(plane.tobytes() for plane in [*planes, np.packbits(upper, bitorder="little")])


def _unpack_places(memory: Buffer, count: int, numel: int) -> np.ndarray:
    """Raises CompressionError unless these are so many places among `numel`, in order."""
    low, plane = _low_bits(count, numel), -(-count // 8)
    packed = np.frombuffer(memory, np.uint8)
    upper = np.flatnonzero(np.unpackbits(packed[low * plane :], bitorder="little"))
    if len(upper) != count:
        raise CompressionError(f"{len(upper)} places of {count}")
    places = upper - np.arange(count) << low
    for bit in range(low):
        places |= np.unpackbits(packed[bit * plane :][:plane], count=count, bitorder="little").astype(np.int64) << bit
    if count and ((np.diff(places) <= 0).any() or places[-1] >= numel):
        raise CompressionError("places without order or beyond the end")
    return places
