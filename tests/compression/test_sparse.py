"""Sparse codecs: the largest elements of each chunk, sizes, second trips, and hostile messages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmcli.compression import TensorDescriptor, codec_named, extract
from swarmcli.compression.sparse import NonzeroQuantization, TopK
from swarmcli.errors import CompressionError
from tests.compression.codecs import received, restore

SHORT = [torch.float16, torch.bfloat16, torch.float32]
sizes = st.sampled_from([1, 2, 31, 33, 255, 4095, 4096, 4097, 4096 * 33 + 5])
every_kind = pytest.mark.parametrize("bits", [1, 2, 4, 8])


def drawn(size: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@every_kind
@settings(max_examples=15)
@given(sizes, st.sampled_from([32, 64, 255]), st.sampled_from(SHORT), st.integers(0, 99), st.sampled_from([1, 2, 9]))
def test_the_largest_of_each_chunk_come_back_and_a_second_trip_changes_no_bit(
    bits: int, size: int, k: int, dtype: torch.dtype, seed: int, coarse: int
) -> None:
    codec, tensor = TopK(k, bits), drawn(size, seed, dtype)
    if coarse > 1:
        tensor = (tensor * coarse).round()  # many of equal magnitude, and zeros
    message = codec.compress(tensor)
    assert message.payload_size == codec.payload_bound(TensorDescriptor.of(tensor))
    once = extract(received(message))
    for exact, sent in zip(tensor.split(4096), once.split(4096), strict=True):
        kept = exact.float().abs().sort(stable=True, descending=True).indices[:k]
        others = torch.ones(len(exact), dtype=torch.bool).index_fill(0, kept, False)
        assert not sent[others].any()
        span = exact[kept].abs().float()
        assert (sent[kept].abs() <= span.max()).all() and (sent[kept].abs().float() >= span.min() * 0.99).all()
        assert (sent[kept] * exact[kept] >= 0).all()
        if bits > 2:
            step = (span.max() - span.min()) / (2 ** (bits - 1) - 1)
            error = (sent[kept].float() - exact[kept].float()).abs()
            assert (error <= step / 2 + 8 * torch.finfo(dtype).eps * span.max()).all()
    bits_of = torch.int32 if dtype is torch.float32 else torch.int16
    assert torch.equal(restore(codec, once).view(bits_of), once.view(bits_of))


def test_a_message_is_small() -> None:
    """64 places with 6 lower bits and 129 bits for all upper ones, 2 bits each, two levels: 48 + 17 + 16 + 8 bytes."""
    assert TopK(64, 2).compress(torch.ones(4096)).payload_size == 89


@settings(max_examples=15)
@given(sizes, st.integers(0, 99), st.sampled_from([0.0, 0.02, 0.3, 1.0]))
def test_averages_are_those_of_blocks_and_zeros_cost_nothing(size: int, seed: int, share: float) -> None:
    tensor = drawn(size, seed) * (drawn(size, seed + 1).sigmoid() < share)
    codec, dense = NonzeroQuantization(), codec_named("blockwise_4bit/4096/dynamic")
    message, chunks = codec.compress(tensor), -(-size // 4096)
    assert torch.equal(codec.extract(received(message)), restore(dense, tensor))
    count = int(restore(dense, tensor).count_nonzero())
    low = (size // max(1, count)).bit_length() - 1  # bits of each place in planes, then a bit for each upper step
    places = low * -(-count // 8) + -(-(count + (size >> low) + 1) // 8)
    squeezed = 4 * chunks + 4 + places + -(-count // 2)
    assert message.payload_size == min(squeezed, codec.payload_bound(TensorDescriptor.of(tensor)))
    assert message.payload_size == codec.payload_of(TensorDescriptor.of(tensor), count)


@pytest.mark.parametrize("codec", [TopK(), NonzeroQuantization()], ids=lambda codec: codec.name)
def test_numbers_that_cannot_be_sent_are_refused_and_others_unchanged(codec: TopK | NonzeroQuantization) -> None:
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(CompressionError, match="NaN or infinity"):
            codec.compress(torch.full((5000,), wrong))
    for other in (torch.arange(9), torch.zeros(0)):
        assert torch.equal(restore(codec, other), other)
    assert codec_named(codec.name).name == codec.name
