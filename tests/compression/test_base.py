"""No compression, and the helpers that all codecs share."""

from __future__ import annotations

import math

import pytest
import torch

from swarmcli.compression import NoCompression, TensorMessage
from swarmcli.compression.base import all_finite
from tests.compression.codecs import FLOATS


def test_no_compression_copies_nothing() -> None:
    tensor = torch.zeros(8)
    message = NoCompression().compress(tensor)
    tensor.fill_(3)
    received_memory = bytearray(b"".join(message.payload))
    restored = NoCompression().extract(TensorMessage(message.header, (received_memory,)))
    assert restored.tolist() == [3.0] * 8
    received_memory[:4] = b"\0\0\0\0"
    assert restored[0] == 0.0


def test_no_compression_gives_back_every_bit() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    restored = NoCompression().extract(NoCompression().compress(bits.view(torch.float16)))
    assert torch.equal(restored.view(torch.int16), bits)


def test_types_that_do_not_travel() -> None:
    with pytest.raises(TypeError, match="float8"):
        NoCompression().compress(torch.zeros(2, dtype=torch.float8_e5m2))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_all_finite_sees_every_element(dtype: torch.dtype) -> None:
    tensor = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(tensor)  # although the sum overflows
    for value in (math.nan, math.inf, -math.inf):
        tensor[577] = value
        assert not all_finite(tensor)
