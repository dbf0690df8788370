from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.training.portable import flatten, unflatten

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers() | st.sampled_from(["$tensor", "$tuple", "$bytes", "$pairs"])
nested = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner),
    max_leaves=12,
)


def through_json(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    return unflatten(json.loads(json.dumps(flatten(value, tensors))), tensors)


@given(nested)
def test_what_goes_in_comes_out_with_its_types(value: object) -> None:
    found = through_json(value)
    assert found == value and repr(found) == repr(value)


def test_tensors_travel_beside_the_text() -> None:
    tensors: dict[str, torch.Tensor] = {}
    state = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.arange(4.0)}},
        "param_groups": [{"betas": (0.9, 1)}],
    }
    text = json.dumps(flatten(state, tensors))
    assert len(tensors) == 2
    found = unflatten(json.loads(text), tensors)
    assert torch.equal(found["state"][0]["exp_avg"], torch.arange(4.0))
    assert found["param_groups"] == [{"betas": (0.9, 1)}]


def test_what_is_no_plain_state_is_refused() -> None:
    with pytest.raises(TypeError, match="a function cannot be part of a checkpoint"):
        flatten({"fn": lambda: None}, {})


def test_a_tensor_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError):
        unflatten({"$tensor": "7"}, {})
