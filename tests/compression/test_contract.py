"""What holds for every codec: the round trip within its bound, exact sizes, and no silent garbage."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarmcli.compression import (
    AdaptiveCompressionBase,
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    TensorDescriptor,
    TensorMessage,
    Uniform8BitQuantization,
    extract,
)
from swarmcli.errors import CompressionError
from tests.compression.codecs import CODECS, FLOATS, PLAIN, WHOLE, error_bound, received, restore

every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.description)
every_plain_codec = pytest.mark.parametrize("codec", PLAIN, ids=lambda codec: codec.description)

shapes = st.one_of(
    st.lists(st.integers(0, 7), max_size=4).map(tuple),
    st.tuples(st.integers(1, 3), st.integers(60, 140)),
    st.tuples(st.integers(250, 260)),
    st.tuples(st.sampled_from([4095, 4096, 4097, 9000])),
)
kinds = st.sampled_from(["normal", "outlier", "offset", "constant", "sparse", "extremes"])


def draw(kind: str, shape: tuple[int, ...], dtype: torch.dtype, exponent: int, seed: int) -> torch.Tensor:
    """Numbers of about 2 ** exponent: subnormals at the one end, at the other what the type can just hold."""
    limit = torch.finfo(dtype).max
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    flat = values.view(-1)
    match kind:
        case "outlier":
            flat[:1] = 1e6
        case "offset":
            values += 1000
        case "constant":
            values.fill_(values.sum() + 0.1)
        case "sparse":
            values *= values > 1
        case "extremes":
            return (values * math.inf).clamp(-limit, limit).nan_to_num(nan=limit).to(dtype)
    return (values * 2.0**exponent).clamp(-limit, limit).to(dtype)


@every_plain_codec
@given(kinds, shapes, st.sampled_from(FLOATS), st.integers(-150, 128), st.integers(0, 2**31))
@example("normal", (300,), torch.float64, -1065, 0)
@example("normal", (300,), torch.float64, 1022, 0)
@example("extremes", (300,), torch.float64, 0, 0)
@example("extremes", (5000,), torch.float32, 0, 1)
@example("outlier", (300,), torch.float32, -149, 0)
@example("outlier", (2, 64), torch.float32, 264, 1)  # the sum of one row only is beyond the range
@example("constant", (4097,), torch.float32, -148, 0)
@example("normal", (150_000,), torch.float32, 0, 2)  # large tensors are worked on in pieces
@example("normal", (1500, 100), torch.float32, 0, 2)
@settings(max_examples=12)
def test_the_error_stays_within_its_bound(
    codec: CompressionBase, kind: str, shape: tuple[int, ...], dtype: torch.dtype, exponent: int, seed: int
) -> None:
    tensor = draw(kind, shape, dtype, exponent, seed)
    message = codec.compress(tensor, CompressionInfo.of(tensor))
    restored = codec.extract(received(message))
    assert (restored.shape, restored.dtype) == (tensor.shape, tensor.dtype)
    assert restored.isfinite().all()
    # Halves: the difference of the two ends of float64 is beyond its range.
    error = (restored.double() / 2 - tensor.double() / 2).abs()
    assert (error <= error_bound(codec, tensor) / 2 + 5e-324).all()
    assert torch.equal(extract(received(message)), restored)  # with nothing but what the message names


SHAPES = [(), (0,), (3, 0, 2), (5,), (2, 100), (255,), (257,), (4097,)]


@every_codec
def test_sizes_are_known_before_and_simple_numbers_come_back_as_they_were(codec: CompressionBase) -> None:
    for shape, dtype, value in itertools.product(SHAPES, FLOATS + WHOLE, (0.0, -2.25, 1.0)):
        tensor = torch.full(shape, abs(value) if dtype in WHOLE else value).to(dtype)
        info = CompressionInfo.of(tensor, key="w")
        resolved, message = codec.codec_for(info), codec.compress(tensor, info)
        assert message.header.codec == resolved.name
        assert message.payload_size == resolved.payload_bound(info.descriptor) <= codec.payload_bound(info.descriptor)
        assert (message.payload_size == 0) == (tensor.numel() == 0)
        restored = codec.extract(received(message))
        assert (restored.shape, restored.dtype) == (tensor.shape, dtype)
        near = 0 if dtype in WHOLE else 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(restored, tensor, rtol=near, atol=0)


@every_codec
def test_nan_and_infinity_are_kept_or_refused(codec: CompressionBase) -> None:
    for size, dtype, value in itertools.product((7, 5000), FLOATS, (math.nan, math.inf, -math.inf)):
        tensor = torch.arange(size).remainder(50).to(dtype)
        tensor[size - 1] = value
        info = CompressionInfo.of(tensor, key="w")
        if codec.codec_for(info).by_content:
            with pytest.raises(CompressionError, match="NaN or infinity"):
                codec.compress(tensor, info)
        else:
            torch.testing.assert_close(restore(codec, tensor, info), tensor, equal_nan=True, rtol=0, atol=0)


@every_codec
def test_strided_tensors_and_those_with_gradients(codec: CompressionBase) -> None:
    base = torch.arange(24.0).reshape(4, 6).requires_grad_()
    tensor = base.t()[::2]
    info = CompressionInfo.of(tensor, key="w")
    restored = restore(codec, tensor, info)
    assert not restored.requires_grad
    assert ((restored - tensor).abs() <= error_bound(codec.codec_for(info), tensor.detach())).all()
    assert torch.equal(restored, restore(codec, tensor.detach().contiguous(), info))


@every_codec
def test_extract_writes_where_it_is_told(codec: CompressionBase) -> None:
    for dtype in FLOATS:
        tensor, out = torch.arange(600.0).reshape(2, 300).to(dtype), torch.empty(600, dtype=dtype)
        message = codec.compress(tensor, CompressionInfo.of(tensor, key="w"))
        assert codec.extract(received(message), out) is out
        assert torch.equal(out, codec.extract(received(message)).reshape(-1))
        for wrong in (torch.empty(601, dtype=dtype), torch.empty(600, dtype=torch.int32)):
            with pytest.raises(CompressionError, match="expected"):
                codec.extract(received(message), wrong)


@every_codec
def test_encoding_and_decoding_leave_their_sources_alone(codec: CompressionBase) -> None:
    for size in (40, 5000):
        tensor = torch.randn(size, generator=torch.Generator().manual_seed(3))
        before = tensor.clone()
        message = received(codec.compress(tensor, CompressionInfo.of(tensor, key="w")))
        content = bytes(message.payload[0])
        codec.extract(message, torch.empty(size))
        assert torch.equal(tensor, before) and bytes(message.payload[0]) == content
        assert torch.equal(codec.extract(TensorMessage(message.header, (content,))), codec.extract(message))


class LargeOnes(AdaptiveCompressionBase):
    """As users write one."""

    def choose_compression(self, info: CompressionInfo) -> CompressionBase:
        return Uniform8BitQuantization() if info.descriptor.numel > 4 else NoCompression()

    def choices(self) -> list[CompressionBase]:
        return [Uniform8BitQuantization(), NoCompression()]


def test_an_adaptive_codec_of_ones_own_needs_public_methods_only() -> None:
    codec = LargeOnes()
    for count, chosen in ((3, "none"), (9, "uniform_8bit")):
        tensor = torch.linspace(0, 1, count)
        message = codec.compress(tensor)
        assert message.header.codec == chosen and message.payload_size <= codec.payload_bound(
            TensorDescriptor.of(tensor)
        )
        assert torch.allclose(codec.extract(received(message)), tensor, atol=1e-2)
    with pytest.raises(CompressionError, match="expected a codec of adaptive"):
        codec.extract(Float16Compression().compress(torch.ones(3)))


def test_no_compression_copies_nothing_and_gives_back_every_bit_of_the_types_that_travel() -> None:
    tensor = torch.zeros(8)
    message = NoCompression().compress(tensor)
    tensor.fill_(3)
    received_memory = bytearray(b"".join(message.payload))
    restored = NoCompression().extract(TensorMessage(message.header, (received_memory,)))
    assert restored.tolist() == [3.0] * 8
    received_memory[:4] = b"\0\0\0\0"
    assert restored[0] == 0.0
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    assert torch.equal(restore(NoCompression(), bits.view(torch.float16)).view(torch.int16), bits)
    with pytest.raises(TypeError, match="float8"):
        NoCompression().compress(torch.zeros(2, dtype=torch.float8_e5m2))
