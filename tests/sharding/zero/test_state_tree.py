"""State taken apart into a description and tensors, and put together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.network import wire
from swarmcli.sharding.zero.state_tree import Node, TensorNode, empty_tensors, put_together, take_apart

PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64])
SHAPES = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape, dtype = draw(SHAPES), draw(DTYPES)
    seed = draw(st.integers(0, 2**31))
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


TREES = st.recursive(
    PLAIN | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(-9, 9), inner, max_size=3)
    ),
    max_leaves=12,
)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype is other.dtype and one.shape == other.shape
        assert torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


@given(TREES)
def test_comes_back_as_it_was(tree: Any) -> None:
    parts: list[torch.Tensor] = []
    node: Any = wire.decode(Node, wire.encode(take_apart(tree, parts)))  # type: ignore[arg-type]
    copies = list(empty_tensors(node))
    for copy, part in zip(copies, parts, strict=True):
        copy.copy_(part)
    assert_same(put_together(node, iter(copies)), tree)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({3: {"momentum": {"rng": object()}}}, r"state\[3\]\['momentum'\]\['rng'\] is a object"),
        ({3: {"history": [1, {4, 5}]}}, r"state\[3\]\['history'\]\[1\] is a set"),
        ({3: {(1, 2): 0}}, r"a key of state\[3\] is a tuple"),
    ],
)
def test_what_cannot_be_sent_is_named(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        take_apart(value, [])


@pytest.mark.parametrize("dtype", ["float31", "Tensor", "__builtins__"])
def test_a_type_that_is_none_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=dtype):
        list(empty_tensors(TensorNode(dtype, [2])))
