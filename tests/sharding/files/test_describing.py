"""What can be described can be read again; everything else is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarmcli.sharding.files.describing import describe
from swarmcli.sharding.zero.state_tree import put_together


def within_itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize("value", [2**64 - 1, -(2**63), (1, [None, "a"]), {"a": {5: True}}, float("inf")])
def test_what_is_described_comes_back(value: Any) -> None:
    assert put_together(describe({"x": value}, [], "here"), iter(())) == {"x": value}


def test_tensors_are_listed_in_the_order_of_the_description() -> None:
    tensors: list[torch.Tensor] = []
    first, second = torch.ones(2), torch.zeros(3)
    node = describe((first, {"a": second}), tensors, "here")
    assert tensors[0] is first and tensors[1] is second
    assert put_together(node, iter(tensors))[1]["a"] is second


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (2**64, "here cannot be written: can't serialize ints"),
        ({True: 1}, "here cannot be written: "),
        ("\ud800", "here cannot be written: .*surrogates"),
        (within_itself(), "here cannot be written: it is nested too deeply"),
        ([print], r"here\[0\] is a builtin_function_or_method"),
    ],
    ids=["int", "key", "text", "loop", "function"],
)
def test_what_could_not_be_read_again_is_named(value: Any, problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        describe(value, [], "here")
