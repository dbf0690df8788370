"""Cutting: every element in exactly one part, of the right reducer, and small enough on the wire."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmcli.averaging.layout import Layout, Plan
from swarmcli.averaging.vector import Inputs, Results
from swarmcli.compression import Float16Compression, NoCompression

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

tensor_kinds = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(FLOATS)), min_size=1, max_size=8
)
shares_lists = st.lists(st.sampled_from([0.0, 0.1, 1 / 3, 1.0, 7.0]), min_size=1, max_size=5).filter(any)


def numbered(kinds: list[tuple[list[int], torch.dtype]]) -> list[torch.Tensor]:
    """Tensors in which no two elements are equal, as far as their types can tell them apart."""
    tensors, count = [], 0
    for shape, dtype in kinds:
        size = torch.Size(shape).numel()
        tensors.append(torch.arange(count, count + size).to(dtype).reshape(shape))
        count += size
    return tensors


@given(tensor_kinds, shares_lists, st.integers(1, 200), st.sampled_from([NoCompression(), Float16Compression()]))
def test_parts_cover_everything_once(
    kinds: list[tuple[list[int], torch.dtype]],
    shares: list[float],
    size: int,
    codec: NoCompression | Float16Compression,
) -> None:
    tensors = numbered(kinds)
    plan = Plan.make(Layout.of(tensors), shares, codec, size)
    inputs, results = Inputs(tensors), Results(plan.layout)
    for part in plan.parts:
        values = inputs.part(part)
        assert codec.compress(values).payload_size <= max(size, 8)
        assert values.numel() == part.descriptor.numel > 0
        results.part(part).copy_(values)
    for copied, tensor in zip(results.tensors(), tensors, strict=True):
        assert torch.equal(copied, tensor) and copied.dtype == tensor.dtype
    assert sum(part.descriptor.numel for part in plan.parts) == plan.layout.numel
    assert all(shares[part.reducer] > 0 for part in plan.parts)
    assert [part.index for part in plan.parts] == list(range(len(plan.parts)))


@given(shares_lists)
def test_reducers_get_their_shares(shares: list[float]) -> None:
    plan = Plan.make(Layout.of([torch.zeros(700), torch.zeros(301)]), shares, NoCompression(), 256)
    for reducer, share in enumerate(shares):
        elements = sum(part.descriptor.numel for part in plan.by_reducer.get(reducer, ()))
        assert elements == pytest.approx(1001 * share / sum(shares), abs=1.01)


def test_tensors_of_one_type_share_parts() -> None:
    layout = Layout.of([torch.zeros(3), torch.zeros(5, dtype=torch.float64), torch.zeros(2, 2)])
    assert [(segment.tensors, segment.starts) for segment in layout.segments] == [((0, 2), (0, 3, 7)), ((1,), (0, 5))]
    plan = Plan.make(layout, [1.0], NoCompression(), 1 << 20)
    assert [part.descriptor.numel for part in plan.parts] == [7, 5]


def test_a_part_within_one_tensor_is_not_copied() -> None:
    tensor = torch.arange(100.0)
    plan = Plan.make(Layout.of([tensor]), [1.0, 1.0], NoCompression(), 80)
    view = Inputs([tensor]).part(plan.parts[1])
    assert view.data_ptr() == tensor[20:].data_ptr() and view.numel() == 20


def test_whatever_must_agree_changes_the_fingerprint() -> None:
    layout = Layout.of([torch.zeros(10)])
    plans = [
        Plan.make(layout, [1.0, 1.0], NoCompression(), 80),
        Plan.make(layout, [1.0, 0.5], NoCompression(), 80),
        Plan.make(layout, [1.0, 1.0], Float16Compression(), 80),
        Plan.make(layout, [1.0, 1.0], NoCompression(), 40),
        Plan.make(Layout.of([torch.zeros(5, 2)]), [1.0, 1.0], NoCompression(), 80),
        Plan.make(Layout.of([torch.zeros(10, dtype=torch.float64)]), [1.0, 1.0], NoCompression(), 80),
    ]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    assert plans[0].fingerprint == Plan.make(layout, [1.0, 1.0], NoCompression(), 80).fingerprint


def test_only_floating_point_tensors_have_a_mean() -> None:
    with pytest.raises(ValueError, match=r"tensor 1 is of type torch\.int64"):
        Layout.of([torch.zeros(1), torch.zeros(1, dtype=torch.int64)])


def test_nothing_to_average_is_a_plan_without_parts() -> None:
    layout = Layout.of([torch.zeros(0), torch.zeros(3, 0, dtype=torch.float64)])
    assert Plan.make(layout, [1.0], NoCompression(), 80).parts == ()
    assert [tensor.shape for tensor in Results(layout).tensors()] == [(0,), (3, 0)]
    assert Results(Layout.of([])).tensors() == []
