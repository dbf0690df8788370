"""The shapes of a model, as a process of its own finds them out."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from swarmcli.errors import RecipeError
from swarmcli.recipe import Recipe
from swarmcli.training import build_task, outline, parameter_groups, saved_buffers
from swarmcli.training.memory import sizes_of_config
from swarmcli.training.outline import outline_of, told_of
from tests.training.small_tasks import outlined, small


def model() -> nn.Module:
    made = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5)).to("meta")
    made[1].weight = made[0].weight  # tied weights are one parameter
    made[1].bias.requires_grad = False
    made.register_parameter("packed", nn.Parameter(torch.zeros(2, dtype=torch.uint8, device="meta"), False))
    made.register_buffer("running", torch.zeros(3, device="meta"))
    made.register_buffer("mask", torch.zeros(4, device="meta"), persistent=False)
    made.config = SimpleNamespace(hidden_size=3, vocab_size=5, attn_pdrop=0.5)  # type: ignore[assignment]
    return made


def shapes(of: nn.Module) -> list[tuple[object, ...]]:
    tensors = [*of.parameters(), *saved_buffers(of)]
    return [(each.shape, each.dtype, each.device.type, each.requires_grad) for each in tensors]


def test_the_process_is_asked_once_and_what_it_says_is_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Recipe] = []

    def says(recipe: Recipe, bounds: object) -> outline.OutlineTold:
        asked.append(recipe)
        return msgspec.json.decode(msgspec.json.encode(told_of(recipe, model())), type=outline.OutlineTold)

    monkeypatch.setattr(outline, "_told", {})
    monkeypatch.setattr(outline, "_told_by_process", says)
    for own in ("local.threads=1", "local.threads=2"):  # what is the volunteer's own changes no shape
        found = outline_of(small(tmp_path, own))
        assert shapes(found) == shapes(model()) and sizes_of_config(found) == sizes_of_config(model())
    assert len(asked) == 1
    outline_of(small(tmp_path, "base_model.n_embd=32"))
    assert len(asked) == 2


def test_an_auxiliary_counts_parameters_as_trainers_do(tmp_path: Path) -> None:
    """Their order follows from names and from what their modules are, which an outline does not have."""
    recipe = small(tmp_path, "optimizer={name: muon, weight_decay: 0.2}")

    def told(model: nn.Module) -> list[Any]:
        every = parameter_groups(recipe, model)
        return [{**group, "params": [each.shape for each in group["params"]]} for group in every]

    assert told(outlined(recipe)) == told(build_task(recipe).build_model(outline=True))


@pytest.mark.parametrize(("bound", "least"), [("seconds", 0.01), ("memory", 1 << 20), ("patience", 0.0)])
def test_a_model_that_takes_too_much_is_refused(bound: str, least: float, tmp_path: Path) -> None:
    bounds = replace(outline.BOUNDS, **{bound: least})  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"small\.yaml:2: base_model: its outline alone takes more than"):
        outline_of(small(tmp_path, "seed=7"), bounds)


def test_what_the_process_says_is_the_shapes_or_the_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(recipe: Recipe) -> Any:
        said = io.BytesIO()
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(msgspec.json.encode(recipe.source))))
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=said))
        outline.main()
        return msgspec.json.decode(said.getvalue())

    recipe = small(tmp_path, "unfrozen_parameters=[transformer.h]")
    sizes = [(tuple(each["size"]), each["trained"]) for each in told(recipe)["parameters"]]
    assert sizes == [(tuple(p.shape), p.requires_grad) for p in build_task(recipe).build_model().parameters()]
    assert "did you mean gpt2?" in told(small(tmp_path, "base_model.model_type=gpt22"))["refused"]
