from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarmcli.errors import RecipeError
from swarmcli.training import Compute, choose_compute

from .small_tasks import small


class Machine:
    """Pretends that torch finds certain devices."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, cuda: int = 0, mps: bool = False, capability: int = 8
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


def test_the_best_device_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small(tmp_path, "local.device=auto")
    Machine(monkeypatch)
    assert choose_compute(recipe) == Compute(torch.device("cpu"))
    Machine(monkeypatch, mps=True)
    assert choose_compute(recipe) == Compute(torch.device("mps"))
    Machine(monkeypatch, cuda=1, mps=True)
    assert choose_compute(recipe) == Compute(torch.device("cuda"), torch.bfloat16)


def test_bfloat16_is_taken_where_it_is_fast_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, cuda=2, capability=7)
    assert choose_compute(small(tmp_path, "local.device=cuda:1")).autocast_dtype is None
    assert (
        choose_compute(small(tmp_path, "local.device=cuda:1", "local.dtype=bfloat16")).autocast_dtype is torch.bfloat16
    )
    assert choose_compute(small(tmp_path, "local.device=cpu", "local.dtype=float16")).kind == "cpu (float16)"
    Machine(monkeypatch, cuda=2, capability=9)
    assert choose_compute(small(tmp_path, "local.device=cuda", "local.dtype=float32")).autocast_dtype is None


def test_a_device_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    for device, words in (("cuda", "torch finds no CUDA device"), ("mps", "torch finds no MPS device")):
        refused = f"local.device={device}: local.device is {device}, but {words}; set it to auto"
        with pytest.raises(RecipeError, match=refused):
            choose_compute(small(tmp_path, f"local.device={device}"))
    Machine(monkeypatch, cuda=2)
    with pytest.raises(RecipeError, match="there are only 2 CUDA devices"):
        choose_compute(small(tmp_path, "local.device=cuda:2"))


def test_threads_are_set(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        choose_compute(small(tmp_path, "local.threads=1"))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_autocast_computes_products_in_the_chosen_precision() -> None:
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    with Compute(torch.device("cpu"), torch.bfloat16).autocast():
        assert layer(x).dtype == torch.bfloat16
    with Compute(torch.device("cpu")).autocast():
        assert layer(x).dtype == torch.float32
