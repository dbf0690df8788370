"""Messages that no encoder makes end in CompressionError, before memory is allocated for what they promise."""

from __future__ import annotations

import itertools
import math
import struct
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmcli.compression import CompressionBase, CompressionInfo, TensorHeader, TensorMessage, codec_named, extract
from swarmcli.errors import CompressionError
from tests.compression.codecs import ADAPTIVE, CODECS, FLOATS, PLAIN, WHOLE, received

BLOCKS = "blockwise_8bit/16/dynamic"
LINEAR = "blockwise_8bit/16/linear"
EVERY_NAME = [*(codec.name for codec in PLAIN), "topk/64/2", "nonzero_4bit"]


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def halves(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)


HOSTILE = [
    ("none", "float32", (1 << 60, 0), b"", "impossible shape"),
    ("none", "float32", (-1, -4), bytes(16), "impossible shape"),
    ("none", "float32", (1,) * 64, bytes(4), "impossible shape"),
    ("none", "complex32", (2,), bytes(8), "unknown dtype"),
    ("none", "bool", (2,), b"\x01\x02", "boolean"),
    ("pickle", "float32", (4,), bytes(16), "unknown codec"),
    ("float16", "int64", (8,), bytes(16), "expected codec none"),
    ("uniform_8bit", "bool", (8,), bytes(16), "expected codec none"),
    ("scaled_float16", "float32", (2,), floats(math.nan, 1) + halves(0, 0), "not finite"),
    ("scaled_float16", "float32", (2,), floats(0, -1) + halves(0, 0), "negative"),
    ("scaled_float16", "float32", (2,), floats(0, 1) + halves(0, math.inf), "not finite"),
    ("uniform_8bit", "float32", (2,), floats(math.nan, 1) + bytes(2), "impossible levels"),
    ("uniform_8bit", "float32", (2,), floats(0, math.inf) + bytes(2), "impossible levels"),
    ("uniform_8bit", "float32", (2,), floats(0, -1) + bytes(2), "impossible levels"),
    ("uniform_8bit", "float16", (2,), floats(0, 1e6) + bytes(2), "impossible levels"),
    ("quantile_8bit", "float32", (2,), floats(0, math.nan) + bytes(2), "not finite"),
    ("quantile_8bit", "float16", (2,), floats(0, 1e6) + bytes(2), "not finite"),
    ("quantile_8bit", "float32", (2,), floats(1, 0) + bytes(2), "no order"),
    ("quantile_8bit", "float32", (2,), floats(0, 1) + b"\0\2", "level 2 of 2"),
    (BLOCKS, "float32", (17,), floats(1, math.nan) + bytes(17), "negative or not finite"),
    (LINEAR, "float32", (2,), floats(-1) + bytes(2), "negative or not finite"),
    (LINEAR, "float16", (2,), floats(7e4) + bytes(2), "negative or not finite"),
    (LINEAR, "float32", (2,), floats(1) + b"\0\x80", "code -128"),
    ("blockwise_4bit/16/linear", "float32", (2,), floats(1) + b"\x80", "code -8"),
    ("blockwise_8bit/0016/linear", "float32", (2,), floats(1) + bytes(2), "unknown codec"),
    ("blockwise_8bit/" + "9" * 5000 + "/linear", "float32", (2,), floats(1) + bytes(2), "unknown codec"),
]


def topk(numbers: tuple[float, ...], places: bytes, codes: bytes) -> bytes:
    return floats(*numbers) + places + codes


GOOD = (1.0, 2.0)
IN_ORDER = b"\x05"  # places 0 and 1 of two: no lower bits; a one, a zero, a one
SPARSE = [
    ("topk/64/2", topk((float("nan"), 1), IN_ORDER, b"\0"), "levels"),
    ("topk/64/2", topk((1, float("inf")), IN_ORDER, b"\0"), "levels"),
    ("topk/64/2", topk((2, 1), IN_ORDER, b"\0"), "levels"),
    ("topk/64/2", topk((-1, 1), IN_ORDER, b"\0"), "levels"),
    ("topk/64/2", topk(GOOD, b"\0", b"\0"), "0 places of 2"),
    ("topk/64/2", topk(GOOD, b"\x15", b"\0"), "3 places of 2"),
    ("topk/64/2", topk(GOOD, b"\x03", b"\0"), "places without order"),
    ("topk/64/2", topk(GOOD, b"\x14", b"\0"), "beyond the end"),
    ("topk/31/2", topk(GOOD, IN_ORDER, b"\0"), "unknown codec"),
    ("topk/064/2", topk(GOOD, IN_ORDER, b"\0"), "unknown codec"),
]


def squeezed(scale: float, count: int, places: bytes, codes: bytes) -> bytes:
    return struct.pack("<fI", scale, count) + places + codes


FIRST = bytes(6) + b"\x01"  # of 100 elements: six planes of a lower bit, then a one


AVERAGES = [
    (squeezed(1, 2, FIRST, b"\x11"), "payload"),
    (squeezed(1, 2, bytes(5) + b"\x03", b"\x11"), "places without order"),
    (squeezed(1, 1, bytes(6) + b"\x03", b"\x01"), "2 places of 1"),
    (squeezed(1, 1, b"\1" * 6 + b"\x02", b"\x01"), "beyond the end"),
    (squeezed(1, 1, FIRST, b"\0"), "code of zero"),
    (squeezed(1, 1, FIRST, b"\x08"), "code -8"),
    (squeezed(-1, 1, FIRST, b"\x01"), "negative"),
    (squeezed(1, 2**32 - 1, FIRST, b"\x01"), "payload"),
    (b"\0" * 5, "payload"),
]


@pytest.mark.parametrize(
    ("codec", "dtype", "shape", "payload", "words"),
    HOSTILE
    + [(codec, "float32", (2,), payload, words) for codec, payload, words in SPARSE]
    + [("nonzero_4bit", "float32", (100,), payload, words) for payload, words in AVERAGES],
)
def test_hostile_messages_end_in_a_named_error(
    codec: str, dtype: str, shape: tuple[int, ...], payload: bytes, words: str
) -> None:
    with pytest.raises(CompressionError, match=words):
        extract(TensorMessage(TensorHeader(codec, dtype, shape), (payload,)))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.description)
def test_a_payload_of_another_size_is_refused(codec: CompressionBase) -> None:
    for dtype, size in itertools.product(FLOATS, (7, 300)):
        tensor = torch.ones(size, dtype=dtype)
        message = received(codec.compress(tensor, CompressionInfo.of(tensor, key="w")))
        payload = bytes(message.payload[0])
        for wrong in (b"", payload[:-1], payload + b"\0"):
            with pytest.raises(CompressionError, match="payload"):
                codec.extract(TensorMessage(message.header, (wrong,)))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.description)
def test_a_codec_reads_only_its_own_messages(codec: CompressionBase) -> None:
    tensor = torch.ones(20)
    own = codec.codec_for(CompressionInfo.of(tensor, key="w")).name
    foreign = [other for other in PLAIN if other.name not in (own, "none")]
    for other in foreign if codec not in ADAPTIVE else [codec_named("bfloat16")]:
        with pytest.raises(CompressionError, match="expected"):
            codec.extract(received(other.compress(tensor)))


@pytest.mark.parametrize("name", EVERY_NAME)
def test_a_promise_allocates_nothing(name: str) -> None:
    """A small message about a large tensor is refused at the cost of a small message."""
    header = TensorHeader(name, "float32", (1 << 20, 1 << 12))
    tracemalloc.start()
    try:
        with pytest.raises(CompressionError, match="payload"):
            extract(TensorMessage(header, (bytes(1000),)))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


names = st.one_of(
    st.sampled_from(EVERY_NAME), st.text(max_size=12), st.text(max_size=6).map("blockwise_8bit/{}".format)
)
types = st.one_of(st.sampled_from([str(dtype).removeprefix("torch.") for dtype in FLOATS + WHOLE]), st.text(max_size=8))
extents = st.one_of(st.integers(0, 20), st.integers())


@settings(max_examples=25)
@given(names, types, st.lists(extents, max_size=3), st.binary(max_size=400))
def test_garbage_never_escapes_the_tree_of_errors(codec: str, dtype: str, shape: list[int], payload: bytes) -> None:
    try:
        restored = extract(TensorMessage(TensorHeader(codec, dtype, tuple(shape)), (payload,)))
    except CompressionError:
        return
    assert list(restored.shape) == shape


@settings(max_examples=50)
@given(st.sampled_from(PLAIN), st.sampled_from(FLOATS), st.integers(1, 90), st.data())
def test_garbage_of_the_right_size_is_refused_or_finite(
    codec: CompressionBase, dtype: torch.dtype, size: int, data: st.DataObject
) -> None:
    """What a quantizing codec makes of any payload is a named error or numbers: never NaN, never infinity."""
    header = TensorHeader(codec.name, str(dtype).removeprefix("torch."), (size,))
    length = codec.payload_bound(header.descriptor())
    payload = data.draw(st.one_of(st.binary(min_size=length, max_size=length), st.just(b"\x7f" * length)))
    try:
        restored = codec.extract(TensorMessage(header, (payload,)))
    except CompressionError:
        return
    assert (restored.shape, restored.dtype) == ((size,), dtype)
    if codec.by_content and codec.codec_for(CompressionInfo(header.descriptor())) is codec:
        assert restored.isfinite().all()
