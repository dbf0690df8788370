"""The cutting of a list of tensors: everything once and in order, nothing beyond the bound, alike for everyone."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from swarmcli.compression import TensorDescriptor
from swarmcli.optim.state.volumes import VOLUME_BYTES, Extent, cut, put

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
tensors = st.builds(TensorDescriptor, shapes, st.sampled_from([torch.float16, torch.float32, torch.float64]))
lists = st.lists(tensors, max_size=12)
bounds = st.integers(1, 4000)
some = settings(max_examples=40)


def nbytes(forms: list[TensorDescriptor], volume: tuple[Extent, ...]) -> int:
    return sum(extent.numel * forms[extent.index].dtype.itemsize for extent in volume)


@some
@given(lists, bounds)
def test_every_element_is_in_one_volume_and_in_order(forms: list[TensorDescriptor], most: int) -> None:
    extents = [extent for volume in cut(forms, most) for extent in volume]
    assert [e.index for e in extents if e.begin == 0] == list(range(len(forms)))
    for one, other in pairwise(extents):
        if other.begin:
            assert (other.index, other.begin) == (one.index, one.end)
        else:
            assert one.end == forms[one.index].numel
    assert not extents or extents[-1].end == forms[-1].numel


@some
@given(lists, bounds)
def test_no_volume_is_beyond_the_bound_and_none_is_wasted(forms: list[TensorDescriptor], most: int) -> None:
    sizes = [nbytes(forms, volume) for volume in cut(forms, most)]
    largest = max((form.dtype.itemsize for form in forms), default=1)
    assert all(size <= max(most, largest) for size in sizes)
    if most >= largest:
        assert all(one + other > most for one, other in pairwise(sizes))


@some
@given(lists, bounds)
def test_what_fits_into_a_volume_is_not_cut_and_slices_are_alike(forms: list[TensorDescriptor], most: int) -> None:
    slices: dict[int, list[int]] = {}
    for volume in cut(forms, most):
        for extent in volume:
            slices.setdefault(extent.index, []).append(extent.numel)
    for index, lengths in slices.items():
        assert len(lengths) == 1 or forms[index].nbytes > most
        assert max(lengths) - min(lengths) <= 1


@some
@given(lists)
def test_what_fits_into_one_volume_is_one(forms: list[TensorDescriptor]) -> None:
    whole = tuple(Extent(index, 0, form.numel) for index, form in enumerate(forms))
    assert cut(forms, max(1, sum(form.nbytes for form in forms))) == [whole]
    assert cut(forms, VOLUME_BYTES) == [whole]


def test_a_large_tensor_between_small_ones() -> None:
    forms = [TensorDescriptor(shape, torch.float32) for shape in ((3,), (2, 13), (1,), ())]
    assert cut(forms, 40) == [
        (Extent(0, 0, 3),),
        (Extent(1, 0, 8),),
        (Extent(1, 8, 17),),
        (Extent(1, 17, 26), Extent(2, 0, 1)),
        (Extent(3, 0, 1),),
    ]


FORMS = [torch.randn(4, 3), torch.randn(3, 4).T, torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]


@pytest.mark.parametrize("tensor", FORMS, ids=["contiguous", "transposed", "channels last"])
def test_elements_are_counted_in_the_flattened_tensor(tensor: torch.Tensor) -> None:
    expected = tensor.reshape(-1).clone()
    expected[3:9] = torch.arange(6.0)
    put(changed := tensor.clone(), 3, torch.arange(6.0))
    assert changed.stride() == tensor.stride()
    assert torch.equal(changed.reshape(-1), expected)
