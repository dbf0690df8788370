"""What is written of a state: its tensors, and all else as text."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from swarmcli.errors import CheckpointError
from swarmcli.files import durable
from swarmcli.files.flat import flatten, unflatten
from swarmcli.files.tensor_file import _NAMES, TensorFile, digest_of, write_tensors

EXAMPLES = {
    "0/step": torch.tensor(3.0),
    "0/exp_avg": torch.arange(6.0).reshape(2, 3),
    "1/empty": torch.empty(0, 4, dtype=torch.int64),
    "1/turned": torch.arange(6).reshape(2, 3).t(),
    "2/flags": torch.tensor([True, False, True]),
    "2/half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
}


def test_what_was_written_is_what_safetensors_reads(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write_tensors(file, EXAMPLES)
    read = load_file(file)
    assert read.keys() == EXAMPLES.keys()
    for name, tensor in EXAMPLES.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name
        assert digest_of(read[name]) == digest_of(tensor)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("dtype", _NAMES, ids=str)
def test_every_type_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1]).to(dtype)
    write_tensors(tmp_path / "x", {"a": tensor, "b": tensor[:1].reshape(())})
    with TensorFile(tmp_path / "x") as file:
        assert file.tensor("a").dtype == dtype
        assert torch.equal(file.tensor("a").view(torch.uint8), tensor.view(torch.uint8))
        assert file.tensor("b").shape == ()


def test_tensors_are_views_of_the_file_until_they_are_used(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {"a": torch.ones(1000), "b": torch.ones(1000)})
    with TensorFile(tmp_path / "x") as file:
        first, second = (file.tensor(name).data_ptr() for name in "ab")
        assert second - first == 4000  # beside each other as in the file, so neither was copied


@pytest.mark.parametrize("left", [0, 60, -1])
def test_a_truncated_file_is_named(tmp_path: Path, left: int) -> None:
    file = tmp_path / "x"
    write_tensors(file, EXAMPLES)
    os.truncate(file, left if left >= 0 else file.stat().st_size + left)
    with pytest.raises(CheckpointError, match=f"{file} is truncated or damaged"):
        TensorFile(file)


def test_a_missing_file_a_missing_tensor_and_a_type_that_the_format_lacks_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="x is missing"):
        TensorFile(tmp_path / "x")
    with pytest.raises(TypeError, match=r"3/odd is torch.complex128"):
        write_tensors(tmp_path / "x", {"3/odd": torch.zeros(1, dtype=torch.complex128)})
    write_tensors(tmp_path / "x", {})
    assert load_file(tmp_path / "x") == {}
    with TensorFile(tmp_path / "x") as file, pytest.raises(CheckpointError, match="no tensor 0/step"):
        file.tensor("0/step")


def test_on_a_full_disk_the_older_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x"
    write_tensors(file, {"a": torch.zeros(3)})

    def full(descriptor: int) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_tensors(file, {"a": torch.ones(3)})
    assert torch.equal(load_file(file)["a"], torch.zeros(3))
    assert list(tmp_path.iterdir()) == [file]


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


def test_what_is_no_plain_state_or_lacks_a_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="state/fn/1 is a function: only tensors, plain values"):
        flatten({"fn": [0, lambda: None]}, {})
    with pytest.raises(TypeError, match="a key of state/3 is a frozenset"):
        flatten({3: {frozenset(): 0}}, {})
    with pytest.raises(KeyError):
        unflatten({"$tensor": "7"}, {}.__getitem__)
