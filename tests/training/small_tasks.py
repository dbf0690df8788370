"""Small recipes, tasks and optimizers for the tests of training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarmcli.recipe import Recipe, parse_recipe
from swarmcli.training import Batch, optimizer_factory, parameter_groups

SMALL = """\
run_id: small
base_model: {model_type: gpt2, n_layer: 1, n_head: 2, n_embd: 16, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0}
datasets:
  - {source: files, path: texts}
sequence_len: 16
tokenizer: bytes
target_batch_size: 8
micro_batch_size: 2
local: {device: cpu, shuffle_buffer_size: 4}
"""


def small(directory: Path, *overrides: str) -> Recipe:
    """A recipe beside a directory `texts` with three files in it."""
    texts = directory / "texts"
    if not texts.exists():
        texts.mkdir()
        for name, letter in (("a", "a"), ("b", "b"), ("c", "c")):
            (texts / f"{name}.txt").write_text(letter * 100)
    return parse_recipe(SMALL, overrides, name="small.yaml", directory=directory)


class LineTask:
    """Fits y = w·x + b; every batch has `size` samples, `count` batches in all."""

    def __init__(self, size: int = 4, count: int | None = None) -> None:
        self.size = size
        self.count = count
        self.spoiled = 0  # so many of the next losses are not numbers

    def build_model(self, *, outline: bool = False) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(3, 1)

    def batches(self, seed: int, position: Mapping[str, Any] | None = None) -> LineStream:
        return LineStream(self, seed, position["drawn"] if position else 0)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = (model(batch["x"]) - batch["y"]).square().mean()
        if self.spoiled:
            self.spoiled -= 1
            return loss * float("nan")
        return loss


class LineStream:
    """The batches of a LineTask."""

    def __init__(self, task: LineTask, seed: int, drawn: int) -> None:
        self.task, self.seed, self.drawn = task, seed, drawn

    def __iter__(self) -> LineStream:
        return self

    def __next__(self) -> Batch:
        if self.drawn == self.task.count:
            raise StopIteration
        self.drawn += 1
        generator = torch.Generator().manual_seed(self.seed + self.drawn)
        x = torch.randn(self.task.size, 3, generator=generator)  # (samples, features)
        return {"x": x, "y": x.sum(1, keepdim=True)}

    def position(self) -> Mapping[str, Any]:
        return {"drawn": self.drawn}


class SoloOptimizer:
    """What a collaborative optimizer does for a peer that is alone: steps when `target` samples are there."""

    is_averaging = False

    def __init__(self, optimizer: torch.optim.Optimizer, target: int) -> None:
        self.optimizer = optimizer
        self.target = target
        self.local_epoch = 0
        self.batch_sizes: list[int] = []
        self._samples = 0
        self._sums: dict[Tensor, Tensor] = {}

    def step(self, *, batch_size: int) -> None:
        self.batch_sizes.append(batch_size)
        self._samples += batch_size
        for parameter in self._parameters():
            assert parameter.grad is not None
            self._sums[parameter] = self._sums.get(parameter, 0) + parameter.grad * batch_size
        if self._samples >= self.target:
            for parameter, total in self._sums.items():
                parameter.grad = total / self._samples
            self.optimizer.step()
            self.local_epoch += 1
            self._samples, self._sums = 0, {}

    def _parameters(self) -> Iterator[Any]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])


def build_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer over the parameters that need gradients."""
    return optimizer_factory(recipe)(parameter_groups(recipe, model))
