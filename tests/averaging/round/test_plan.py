"""Cutting: every element in exactly one part, of the right reducer, and small enough on the wire."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.round.buffers import Inputs, Results
from swarmcli.averaging.round.plan import Layout, Plan, compression_term
from swarmcli.compression import (
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    PerTensorCompression,
    RoleAdaptiveCompression,
    SizeAdaptiveCompression,
    TensorDescriptor,
    TensorRole,
    TopK,
    Uniform8BitQuantization,
)
from swarmcli.memory import fresh_memory
from tests.compression.codecs import PLAIN

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


MIXED = SizeAdaptiveCompression(20, NoCompression(), BlockwiseQuantization(16))


@settings(max_examples=40)
@given(tensor_kinds, shares_lists, st.integers(1, 200), st.sampled_from([*PLAIN, MIXED]))
def test_parts_cover_everything_once(
    kinds: list[tuple[list[int], torch.dtype]], shares: list[float], size: int, codec: CompressionBase
) -> None:
    tensors = numbered(kinds)
    plan = Plan.make(Layout.of(tensors, codec), shares, size)
    inputs, results = Inputs(tensors), Results(plan.layout, fresh_memory(plan.layout.nbytes))
    for part in plan.parts:
        values = inputs.part(part)
        payload = part.codec.compress(values).payload_size
        assert payload <= part.payload_bound
        assert payload <= size or part.descriptor.numel == 1
        assert values.numel() == part.descriptor.numel > 0
        results.part(part).copy_(values)
    for copied, tensor in zip(results.tensors(), tensors, strict=True):
        assert torch.equal(copied, tensor) and copied.dtype == tensor.dtype
    assert sum(part.descriptor.numel for part in plan.parts) == plan.layout.numel
    assert all(shares[part.reducer] > 0 for part in plan.parts)
    assert [part.index for part in plan.parts] == list(range(len(plan.parts)))


@given(shares_lists)
def test_reducers_get_their_shares(shares: list[float]) -> None:
    plan = Plan.make(Layout.of([torch.zeros(700), torch.zeros(301)]), shares, 256)
    for reducer, share in enumerate(shares):
        elements = sum(part.descriptor.numel for part in plan.by_reducer.get(reducer, ()))
        assert elements == pytest.approx(1001 * share / sum(shares), abs=1.01)


def test_parts_of_codecs_that_look_at_the_content_end_with_their_tensors() -> None:
    tensors = [torch.zeros(700), torch.zeros(0), torch.zeros(10), torch.zeros(1300)]
    sizes = {
        codec.name: [part.descriptor.numel for part in Plan.make(Layout.of(tensors, codec), [1.0], 1008).parts]
        for codec in (Float16Compression(), Uniform8BitQuantization())
    }
    assert sizes == {"float16": [504] * 3 + [498], "uniform_8bit": [700, 10, 1000, 300]}
    shared = Plan.make(Layout.of(tensors, Uniform8BitQuantization()), [1.0, 1.0], 1008)
    assert [(part.reducer, part.start, part.stop) for part in shared.parts] == [
        (0, 0, 700),
        (0, 700, 710),
        (0, 710, 1005),
        (1, 1005, 2005),
        (1, 2005, 2010),
    ]


@given(st.lists(st.integers(0, 40_000), min_size=1, max_size=4), shares_lists, st.integers(1, 9000))
def test_parts_end_between_chunks_and_fit_in_both_directions(sizes: list[int], shares: list[float], most: int) -> None:
    layout, codec = Layout.of([torch.zeros(size) for size in sizes], TopK()), TopK()
    plan = Plan.make(layout, shares, most)
    (segment,) = layout.segments
    assert [part.stop for part in plan.parts[:-1]] == [part.start for part in plan.parts[1:]]
    assert sum(part.descriptor.numel for part in plan.parts) == sum(sizes)
    for part in plan.parts:
        tensor = max(start for start in segment.starts if start <= part.start)
        assert (part.start - tensor) % codec.chunk == 0
        larger = max(part.payload_bound, part.average_bound)
        assert larger <= most or part.descriptor.numel <= codec.chunk
        assert part.average_codec.name == "nonzero_4bit"


def test_peers_compare_codecs_with_their_parameters() -> None:
    tensors = [torch.zeros(30), torch.zeros(3)]

    def term(codec: CompressionBase, infos: list[CompressionInfo] | None = None) -> str:
        return compression_term(codec, Layout.of(tensors, codec, infos))

    assert term(Float16Compression()) == "float16"
    assert term(BlockwiseQuantization(64, "linear")) == "blockwise_8bit/64/linear"
    many = PerTensorCompression({index: BlockwiseQuantization() for index in range(50)})
    roles = RoleAdaptiveCompression(gradient=Float16Compression())
    gradients = [CompressionInfo.of(tensor, role=TensorRole.GRADIENT) for tensor in tensors]
    terms = [
        term(SizeAdaptiveCompression(10, Float16Compression(), Uniform8BitQuantization())),
        term(SizeAdaptiveCompression(11, Float16Compression(), Uniform8BitQuantization())),
        term(SizeAdaptiveCompression(10, Float16Compression(), BlockwiseQuantization())),
        term(many),
        term(PerTensorCompression({index: BlockwiseQuantization(64) for index in range(50)})),
        term(roles),
        term(roles, gradients),
    ]
    assert len(set(terms)) == len(terms) and all(len(each) <= 200 for each in terms)
    assert terms[0].startswith("size_adaptive(10, float16, uniform_8bit) ")


def test_a_part_within_one_tensor_is_not_copied() -> None:
    tensor = torch.arange(100.0)
    plan = Plan.make(Layout.of([tensor]), [1.0, 1.0], 80)
    view = Inputs([tensor]).part(plan.parts[1])
    assert view.data_ptr() == tensor[20:].data_ptr() and view.numel() == 20


def test_whatever_must_agree_changes_the_fingerprint() -> None:
    layout = Layout.of([torch.zeros(10)])
    plans = [
        Plan.make(layout, [1.0, 1.0], 80),
        Plan.make(layout, [1.0, 0.5], 80),
        Plan.make(Layout.of([torch.zeros(10)], Float16Compression()), [1.0, 1.0], 80),
        Plan.make(Layout.of([torch.zeros(10)], BlockwiseQuantization(16)), [1.0, 1.0], 80),
        Plan.make(Layout.of([torch.zeros(10)], BlockwiseQuantization(32)), [1.0, 1.0], 80),
        Plan.make(layout, [1.0, 1.0], 40),
        Plan.make(Layout.of([torch.zeros(5, 2)]), [1.0, 1.0], 80),
        Plan.make(Layout.of([torch.zeros(10, dtype=torch.float64)]), [1.0, 1.0], 80),
    ]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    assert plans[0].fingerprint == Plan.make(layout, [1.0, 1.0], 80).fingerprint


def test_only_floating_point_tensors_have_a_mean() -> None:
    with pytest.raises(ValueError, match=r"tensor 1 is of type torch\.int64"):
        Layout.of([torch.zeros(1), torch.zeros(1, dtype=torch.int64)])


@pytest.mark.parametrize(
    ("mebibytes", "shares", "codec", "kibibytes"),
    [
        (64, [1.0] * 4, NoCompression(), 1024),
        (64, [1.0, 1.0, 0.0, 0.0], NoCompression(), 1024),
        (64, [1.0] * 4, Float16Compression(), 512),  # 8 MiB on the wire for each
        (60, [1.0] * 4, NoCompression(), 512),
        (1, [1.0] * 4, NoCompression(), 256),
        (1024, [1.0] * 4, NoCompression(), 1024),
    ],
)
def test_parts_above_half_a_mebibyte_leave_each_reducer_sixteen(
    mebibytes: int, shares: list[float], codec: CompressionBase, kibibytes: int
) -> None:
    layout = Layout((TensorDescriptor((mebibytes << 18,), torch.float32),), (codec,))
    plan = Plan.make(layout, shares, AllreduceOptions().part_size_bytes)
    assert max(part.payload_bound for part in plan.parts) == kibibytes << 10
    assert min(len(parts) for parts in plan.by_reducer.values()) >= (16 if kibibytes == 1024 else 1)
