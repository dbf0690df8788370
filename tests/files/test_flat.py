from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.files.flat import flatten, unflatten

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape, seed = draw(st.lists(st.integers(0, 3), max_size=3)), draw(st.integers(0, 2**31))
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 4).to(draw(DTYPES))


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers() | st.sampled_from(["$tensor", "$tuple", "$bytes", "$pairs"])
nested = st.recursive(
    scalars | tensors(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner),
    max_leaves=12,
)


def through_json(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    return unflatten(json.loads(json.dumps(flatten(value, tensors))), tensors.__getitem__)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one is other
    elif isinstance(one, dict):
        assert_same(list(one), list(other))
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


@given(nested)
def test_what_goes_in_comes_out_with_its_types(value: object) -> None:
    assert_same(through_json(value), value)


def test_tensors_travel_beside_the_text() -> None:
    tensors: dict[str, torch.Tensor] = {}
    state = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.arange(4.0)}},
        "param_groups": [{"betas": (0.9, 1)}],
    }
    text = json.dumps(flatten(state, tensors))
    assert list(tensors) == ["state/state/0/step", "state/state/0/exp_avg"]
    found = unflatten(json.loads(text), tensors.__getitem__)
    assert torch.equal(found["state"][0]["exp_avg"], torch.arange(4.0))
    assert found["param_groups"] == [{"betas": (0.9, 1)}]


def test_what_is_no_plain_state_is_refused() -> None:
    with pytest.raises(TypeError, match="state/fn/1 is a function: only tensors, plain values"):
        flatten({"fn": [0, lambda: None]}, {})
    with pytest.raises(TypeError, match="a key of state/3 is a frozenset"):
        flatten({3: {frozenset(): 0}}, {})


def test_a_tensor_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError):
        unflatten({"$tensor": "7"}, {}.__getitem__)
