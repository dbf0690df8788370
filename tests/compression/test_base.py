"""What holds for every codec: the round trip within its bound, and hostile messages end in a named error."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.compression import (
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    TensorHeader,
    TensorMessage,
    codec_named,
    extract,
)
from swarmcli.compression.base import all_finite
from swarmcli.errors import CompressionError

CODECS: list[CompressionBase] = [NoCompression(), Float16Compression()]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


def error_bound(codec: CompressionBase, tensor: torch.Tensor) -> torch.Tensor:
    """The largest error that the codec's docstring allows, element by element, in float64."""
    exact = tensor.double()
    if isinstance(codec, NoCompression):
        return torch.zeros_like(exact)
    clipped = exact.clamp(-65504, 65504)
    # The way back rounds once more where the tensor's own type is coarser than half precision.
    own_rounding = torch.finfo(tensor.dtype).eps / 2
    return (exact - clipped).abs() + clipped.abs() * (2**-11 + own_rounding) + 2**-25


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@given(shape=shapes, dtype=st.sampled_from(FLOATS), exponent=st.integers(-44, 127), seed=st.integers(0, 2**31))
def test_the_error_stays_within_its_bound(
    codec: CompressionBase, shape: tuple[int, ...], dtype: torch.dtype, exponent: int, seed: int
) -> None:
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    limit = torch.finfo(dtype).max
    tensor = values.clamp(-limit, limit).to(dtype)
    message = codec.compress(tensor, CompressionInfo.of(tensor))
    restored = extract(received(message))
    assert (restored.shape, restored.dtype) == (tensor.shape, tensor.dtype)
    assert ((restored.double() - tensor.double()).abs() <= error_bound(codec, tensor)).all()
    assert message.payload_size <= codec.payload_bound(CompressionInfo.of(tensor).descriptor)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_whole_numbers_travel_unchanged(codec: CompressionBase, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    restored = codec.extract(received(codec.compress(tensor)))
    assert torch.equal(restored, tensor) and restored.dtype == dtype
    assert codec.estimate_compression_ratio(CompressionInfo.of(tensor)) == 1.0


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("tensor", [torch.tensor(1.5), torch.zeros(0), torch.zeros(3, 0, 2), torch.full((5,), -2.25)])
def test_odd_shapes(codec: CompressionBase, tensor: torch.Tensor) -> None:
    assert torch.equal(codec.extract(received(codec.compress(tensor))), tensor)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_infinities_and_nan_are_not_hidden(codec: CompressionBase) -> None:
    tensor = torch.tensor([math.inf, -math.inf, math.nan, 1.0, 1e30 if codec.name == "none" else 65504.0])
    restored = codec.extract(received(codec.compress(tensor)))
    assert torch.equal(restored.isnan(), tensor.isnan())
    assert torch.equal(restored[[0, 1, 3, 4]], tensor[[0, 1, 3, 4]])


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_strided_tensors_and_those_with_gradients(codec: CompressionBase) -> None:
    base = torch.arange(24.0).reshape(4, 6).requires_grad_()
    tensor = base.t()[::2]
    assert torch.equal(codec.extract(received(codec.compress(tensor))), tensor)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_extract_writes_where_it_is_told(codec: CompressionBase) -> None:
    tensor, out = torch.arange(6.0).reshape(2, 3), torch.empty(6)
    assert codec.extract(received(codec.compress(tensor)), out) is out
    assert torch.equal(out, tensor.reshape(-1))
    for wrong in (torch.empty(7), torch.empty(6, dtype=torch.float64)):
        with pytest.raises(CompressionError, match="expected"):
            codec.extract(codec.compress(tensor), wrong)


def test_no_compression_copies_nothing() -> None:
    tensor = torch.zeros(8)
    message = NoCompression().compress(tensor)
    tensor.fill_(3)
    received_memory = bytearray(b"".join(message.payload))
    restored = NoCompression().extract(TensorMessage(message.header, (received_memory,)))
    assert restored.tolist() == [3.0] * 8
    received_memory[:4] = b"\0\0\0\0"
    assert restored[0] == 0.0


HOSTILE = [
    (TensorHeader("none", "float32", (4,)), 15, "payload of 16 bytes"),
    (TensorHeader("none", "float32", (1 << 47,)), 16, "payload"),
    (TensorHeader("none", "float32", (1 << 60, 0)), 0, "impossible shape"),
    (TensorHeader("none", "float32", (-1, -4)), 16, "impossible shape"),
    (TensorHeader("none", "float32", (1,) * 64), 4, "impossible shape"),
    (TensorHeader("none", "complex64", (2,)), 16, "unknown dtype"),
    (TensorHeader("none", "__class__", (2,)), 16, "unknown dtype"),
    (TensorHeader("pickle", "float32", (4,)), 16, "unknown codec"),
    (TensorHeader("float16", "float32", (4,)), 16, "payload of 8 bytes"),
    (TensorHeader("float16", "int64", (8,)), 16, "half precision"),
]


@pytest.mark.parametrize(("header", "size", "words"), HOSTILE)
def test_hostile_messages_end_in_a_named_error(header: TensorHeader, size: int, words: str) -> None:
    with pytest.raises(CompressionError, match=words):
        extract(TensorMessage(header, (bytes(size),)))


def test_booleans_are_zero_or_one() -> None:
    with pytest.raises(CompressionError, match="boolean"):
        extract(TensorMessage(TensorHeader("none", "bool", (2,)), (b"\x01\x02",)))


@given(codec=st.text(max_size=8), dtype=st.text(max_size=8), shape=st.lists(st.integers()), payload=st.binary())
def test_garbage_never_escapes_the_tree_of_errors(codec: str, dtype: str, shape: list[int], payload: bytes) -> None:
    for name in ("none", "float16", codec):
        with pytest.raises(CompressionError):
            extract(TensorMessage(TensorHeader(name, dtype, tuple(shape)), (payload,)))


def test_a_codec_reads_only_its_own_messages() -> None:
    message = Float16Compression().compress(torch.ones(2))
    with pytest.raises(CompressionError, match="expected codec none"):
        NoCompression().extract(message)
    assert codec_named("float16").name == "float16"


def test_types_that_do_not_travel() -> None:
    with pytest.raises(TypeError, match="complex64"):
        NoCompression().compress(torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_all_finite_sees_every_element(dtype: torch.dtype) -> None:
    tensor = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(tensor)  # although the sum overflows
    for value in (math.nan, math.inf, -math.inf):
        tensor[577] = value
        assert not all_finite(tensor)


def received(message: TensorMessage) -> TensorMessage:
    """As it arrives: all buffers one behind the other."""
    return TensorMessage(message.header, (bytearray(b"".join(bytes(piece) for piece in message.payload)),))
