"""One rank's files: what goes in comes out, and what was harmed is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from swarmcli.errors import CheckpointError
from swarmcli.sharding.files.shard import Shard, shard_file, write_shard
from tests.sharding.files.jobs import differing

STATE: dict[int, dict[str, Any]] = {
    3: {"step": torch.tensor(7.0), "exp_avg": torch.randn(4, 5), "max_exp_avg_sq": None, "eta": 0.125, "count": 3},
    10: {
        "momentum_buffer": torch.randn(6).to(torch.bfloat16),
        "name": "late",
        "prev": [torch.ones(2), (torch.zeros(()),)],
    },
    11: {},
}


def test_state_of_every_kind_comes_back(tmp_path: Path) -> None:
    record = write_shard(tmp_path, 2, STATE)
    assert (record.rank, sorted(record.entries)) == (2, [3, 10, 11])
    assert sorted(load_file(shard_file(tmp_path, 2))) == [
        "10/momentum_buffer", "10/prev/0", "10/prev/1/0", "3/exp_avg", "3/step",
    ]  # fmt: skip
    with Shard(tmp_path, record) as shard:
        shard.check_fit(12)
        shard.check_content(shard.state)
        prev = shard.state[10]["prev"]
        assert isinstance(prev[1], tuple)
        assert torch.equal(prev[0], torch.ones(2))
        found = {i: {k: v for k, v in values.items() if k != "prev"} for i, values in shard.state.items()}
        expected = {i: {k: v for k, v in values.items() if k != "prev"} for i, values in STATE.items()}
        assert differing(found, expected) == []


def test_names_that_look_like_others_are_kept_apart(tmp_path: Path) -> None:
    state = {1: {"a": [torch.zeros(1)], "a/0": torch.ones(1), "a/": [torch.full((1,), 2.0)], "a//0": torch.tensor(3.0)}}
    record = write_shard(tmp_path, 0, state)
    with Shard(tmp_path, record) as shard:
        found = shard.state[1]
        assert [float(found["a"][0]), float(found["a/0"]), float(found["a/"][0]), float(found["a//0"])] == [0, 1, 2, 3]


def test_each_flipped_bit_of_the_tensors_is_noticed_where_it_lies(tmp_path: Path) -> None:
    record = write_shard(tmp_path, 0, STATE)
    file = shard_file(tmp_path, 0)
    tensors = load_file(file)
    tensors["3/exp_avg"].view(-1)[7] += 1
    save_file(tensors, file, {"mark": record.mark})
    record = msgspec.structs.replace(record, nbytes=file.stat().st_size)
    with Shard(tmp_path, record) as shard:
        shard.check_content([10, 11])
        with pytest.raises(CheckpointError, match=rf"{file} is damaged: 3/exp_avg is not what was written"):
            shard.check_content([3])


def test_a_file_that_is_not_the_recorded_one_is_refused(tmp_path: Path) -> None:
    record = write_shard(tmp_path, 0, STATE)
    with pytest.raises(CheckpointError, match="is not of the 1 bytes that were written"):
        Shard(tmp_path, msgspec.structs.replace(record, nbytes=1))
    with Shard(tmp_path, record) as shard, pytest.raises(CheckpointError, match="state of parameter 3 of only 2"):
        shard.check_fit(2)
    write_shard(tmp_path, 0, STATE)
    with pytest.raises(CheckpointError, match=f"{shard_file(tmp_path, 0)} belongs to another save"):
        Shard(tmp_path, record)


def test_tensors_of_other_forms_than_described_are_refused(tmp_path: Path) -> None:
    record = write_shard(tmp_path, 0, STATE)
    file = shard_file(tmp_path, 0)
    tensors = load_file(file)
    save_file({**tensors, "3/exp_avg": tensors["3/exp_avg"].reshape(5, 4)}, file, {"mark": record.mark})
    reshaped = Shard(tmp_path, msgspec.structs.replace(record, nbytes=file.stat().st_size))
    with reshaped, pytest.raises(CheckpointError, match="3/exp_avg is not what was written"):
        reshaped.check_content([3])
    save_file({name: tensor for name, tensor in tensors.items() if name != "3/step"}, file, {"mark": record.mark})
    with pytest.raises(CheckpointError, match="has no tensor 3/step"):
        Shard(tmp_path, msgspec.structs.replace(record, nbytes=file.stat().st_size))


@pytest.mark.parametrize("odd", [print, 2**64, "\ud800", np.float64(2.0)], ids=["code", "int", "text", "numpy"])
def test_what_could_not_be_read_again_is_named_and_leaves_nothing(tmp_path: Path, odd: Any) -> None:
    with pytest.raises(TypeError, match="7/seed"):
        write_shard(tmp_path, 0, {7: {"seed": [odd]}})
    with pytest.raises(TypeError, match=r"state\[7\] has the key 5, a int: only texts"):
        write_shard(tmp_path, 0, {7: {5: 1.0}})  # type: ignore[dict-item]
    within_itself: list[Any] = []
    within_itself.append(within_itself)
    with pytest.raises(TypeError, match="7/seed cannot be written: it is nested too deeply"):
        write_shard(tmp_path, 0, {7: {"seed": within_itself}})
    assert list(tmp_path.iterdir()) == []


TENSORS = st.builds(
    lambda shape, dtype, seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(50).to(dtype),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]),
    st.integers(0, 100),
)
PLAIN = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(
    TENSORS | PLAIN, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner), max_leaves=6
)
STATES = st.dictionaries(st.integers(0, 2000), st.dictionaries(st.text(max_size=8), VALUES, max_size=4), max_size=6)


def parts(value: Any) -> Any:
    """Lists and tuples as dicts, which `differing` compares."""
    if isinstance(value, list | tuple):
        return {"kind": type(value).__name__} | {str(place): parts(item) for place, item in enumerate(value)}
    return {key: parts(item) for key, item in value.items()} if isinstance(value, dict) else value


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STATES)
def test_any_state_comes_back_bit_for_bit(tmp_path: Path, state: dict[int, dict[str, Any]]) -> None:
    record = write_shard(tmp_path, 0, state)
    with Shard(tmp_path, record) as shard:
        shard.check_content(shard.state)
        assert differing(parts(dict(shard.state)), parts(state)) == []
