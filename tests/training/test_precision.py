"""How a volunteer's machine computes: precision, memory for speed, compiled or not. The gradients stay the same."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swarmcli.errors import RecipeError, TrainingError
from swarmcli.training import Compute, LoopSettings, TrainingLoop, build_task, choose_compute
from swarmcli.training.device import LossScaler
from swarmcli.training.memory import activation_bytes
from swarmcli.training.task import Batch

from .small_tasks import LineTask, SoloOptimizer, build_optimizer, saved_bytes, small

CPU = torch.device("cpu")


def trained(
    directory: Path, *overrides: str, epochs: int = 4, compute: Compute | None = None, compiled: bool = False
) -> list[float]:
    """The losses of a few steps."""
    recipe = small(directory, "local.micro_batch_size=2", *overrides)
    task = build_task(recipe)
    model = task.build_model()
    losses: list[float] = []
    TrainingLoop(
        task,
        model,
        SoloOptimizer(build_optimizer(recipe, model), 2),
        LoopSettings(1, 1, compile=compiled),
        last_epoch=lambda: epochs,
        compute=compute or Compute(CPU),
        on_loss=lambda loss, samples: losses.append(loss),
    ).run(threading.Event())
    return losses


def test_float16_with_scaled_losses_learns_as_float32_does(tmp_path: Path) -> None:
    """A scale that is too large at first costs some batches, so that steps are of others."""
    exact, rough = (
        trained(tmp_path, "optimizer.learning_rate=0.01", epochs=40, compute=Compute(CPU, dtype))
        for dtype in (None, torch.float16)
    )
    assert exact[-1] < exact[0] - 1 and rough[-1] == pytest.approx(exact[-1], abs=0.3)


def test_a_scale_that_is_too_large_costs_steps_and_is_halved_until_it_fits() -> None:
    weight = nn.Parameter(torch.ones(2))
    scaler = LossScaler(scale=4.0, growth_steps=2)
    weight.grad = torch.tensor([float("inf"), 1.0])
    assert not scaler.unscale([weight]) and scaler.scale == 2.0
    weight.grad = torch.tensor([float("inf"), 1.0])
    least = LossScaler(scale=2.0**-13)
    for _ in range(3):
        assert not least.unscale([weight]) and least.scale == 2.0**-14
    for expected in (2.0, 4.0):
        weight.grad = torch.tensor([2.0, 4.0])
        before = scaler.scale
        assert scaler.unscale([weight]) and scaler.scale == expected
        torch.testing.assert_close(weight.grad, torch.tensor([2.0, 4.0]) / before)


class Overflowing(LineTask):
    """Finite losses, and gradients that never are."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return super().loss(model, batch) + 0 * (model.weight - model.weight.detach()).abs().sqrt().sum()


@pytest.mark.parametrize("asked", [3, None])
def test_gradients_that_are_never_finite_end_training_with_advice_and_heed_a_stop(asked: int | None) -> None:
    task, stop, seen = Overflowing(), threading.Event(), []
    model = task.build_model()

    def rest() -> bool:
        seen.append(None)
        if len(seen) == asked:
            stop.set()
        return False

    solo = SoloOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 4)
    loop = TrainingLoop(task, model, solo, LoopSettings(1), compute=Compute(CPU, torch.float16), rest=rest)
    if asked:
        assert loop.run(stop).reason == "stopped" and len(seen) == asked
    else:
        with pytest.raises(TrainingError, match=r"gradients .* 20 steps in a row \(float16, .* by 0.0625 at last\)"):
            loop.run(stop)
    assert solo.batch_sizes == []


def test_gradient_checkpointing_keeps_less_and_computes_the_same(tmp_path: Path) -> None:
    assert trained(tmp_path, "gradient_checkpointing=true") == pytest.approx(trained(tmp_path), abs=1e-6)

    def kept(*overrides: str) -> int:
        recipe = small(tmp_path, "base_model.n_layer=4", "local.micro_batch_size=4", *overrides)
        task = build_task(recipe)
        model, batch = task.build_model(), next(iter(task.batches(0)))
        assert activation_bytes(recipe, task.build_model(outline=True), Compute(CPU)) > 0
        return saved_bytes(model, lambda: task.loss(model, batch))

    assert kept("gradient_checkpointing=true") < 0.5 * kept()


def test_a_model_that_is_computed_only_whole_refuses_checkpointing(tmp_path: Path) -> None:
    fields = "{model_type: gpt2, n_layer: 1, n_head: 2, n_embd: 16}"
    task = build_task(small(tmp_path, f"base_model={fields}", "gradient_checkpointing=true"))
    from transformers import GPT2LMHeadModel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPT2LMHeadModel, "supports_gradient_checkpointing", False)
        with pytest.raises(RecipeError, match=r"gradient_checkpointing: transformers computes a gpt2 only with all"):
            task.build_model()


def test_attention_is_computed_as_the_volunteer_says_or_refused(tmp_path: Path) -> None:
    model: Any = build_task(small(tmp_path, "local.attn_implementation=eager")).build_model()
    assert model.config._attn_implementation == "eager"
    with pytest.raises(RecipeError, match=r"local\.attn_implementation: flash_attention_2 cannot be used here"):
        build_task(small(tmp_path, "local.attn_implementation=flash_attention_2")).build_model()


def test_a_model_that_torch_does_not_compile_is_trained_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(model: nn.Module) -> Any:
        def compiled(*args: Any, **options: Any) -> None:
            raise RuntimeError("no compiler was found")

        compiled.config = model.config  # type: ignore[attr-defined]  # torch's stands for all that its model has
        return compiled

    monkeypatch.setattr(torch, "compile", refuse)
    with caplog.at_level(logging.WARNING):
        assert trained(tmp_path, compiled=True) == trained(tmp_path)
    assert caplog.text.count("torch.compile cannot compile this model (no compiler was found)") == 1


@pytest.mark.soak
def test_a_compiled_model_learns_the_same(tmp_path: Path) -> None:
    assert trained(tmp_path, compiled=True) == pytest.approx(trained(tmp_path), abs=1e-4)


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
    second = "local.device=cuda:1"
    assert choose_compute(small(tmp_path, second)).autocast_dtype is None
    assert choose_compute(small(tmp_path, second, "local.dtype=bfloat16")).autocast_dtype is torch.bfloat16
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


def test_threads_and_the_precision_of_matrices_are_set_as_the_volunteer_says(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        choose_compute(small(tmp_path, "local.threads=1", "local.matmul_precision=high"))
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (1, "high")
    finally:
        torch.set_num_threads(before)
        torch.set_float32_matmul_precision("highest")
