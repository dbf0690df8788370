"""The outline of a model is built once and kept; what is kept is read only if it is whole and this user's own."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import swarmcli
from swarmcli.errors import RecipeError
from swarmcli.recipe import Recipe
from swarmcli.training import build_task, outline, parameter_groups, saved_buffers
from swarmcli.training.memory import sizes_of_config
from swarmcli.training.outline import keep_outline, outline_of
from tests.training.small_tasks import small


class Builds:
    """Stands for the process that builds outlines, and counts how often it is asked."""

    times = 0

    def __call__(self, recipe: Recipe) -> nn.Module:
        self.times += 1
        return model()


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


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    counted = Builds()
    monkeypatch.setenv("SWARM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(outline, "outline_in_process", counted)
    return counted


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "outlines").iterdir())


def test_who_only_looks_leaves_nothing_and_who_takes_part_builds_once(tmp_path: Path, builds: Builds) -> None:
    recipe = small(tmp_path)
    outline_of(recipe)
    outline_of(recipe)
    assert builds.times == 2 and not (tmp_path / "cache").exists()
    keep_outline(recipe, model())
    found = outline_of(small(tmp_path, "local.threads=1"))  # what is the volunteer's own changes no shape
    assert builds.times == 2
    assert shapes(found) == shapes(model()) and sizes_of_config(found) == sizes_of_config(model())
    keep_outline(recipe, found)
    assert shapes(outline_of(recipe)) == shapes(model()) and len(files(tmp_path)) == 1


def test_an_auxiliary_counts_parameters_as_trainers_do(tmp_path: Path, builds: Builds) -> None:
    """Their order follows from names and from what their modules are, which an outline does not have."""
    groups = "groups: [{match: 'transformer.h', learning_rate: 0.1}], weight_decay: 0.2"
    recipe = small(tmp_path, f"optimizer={{name: muon, {groups}}}")
    built = build_task(recipe).build_model(outline=True)
    keep_outline(recipe, built)

    def told(model: nn.Module) -> list[Any]:
        every = parameter_groups(recipe, model)
        return [{**group, "params": [each.shape for each in group["params"]]} for group in every]

    assert told(outline_of(recipe)) == told(built)


def test_another_recipe_or_version_and_a_model_with_code_of_its_own_are_built(
    tmp_path: Path, builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_outline(small(tmp_path), model())
    keep_outline(small(tmp_path, "local.trust_remote_code=true"), model())
    assert len(files(tmp_path)) == 1
    for override in ("base_model.n_embd=32", "sequence_len=8", "local.trust_remote_code=true"):
        outline_of(small(tmp_path, override))
    assert builds.times == 3
    newer: list[tuple[object, str, object]] = [
        (swarmcli, "__version__", "9"),
        (torch, "__version__", "9"),
        (outline, "version", lambda package: "9"),
    ]
    for where, name, value in newer:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            outline_of(small(tmp_path))
    assert builds.times == 6


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"parameters":[{"size":[5,3],"dtype":"flo',
        b'{"refused":"no"}',
        b'{"parameters":[{"size":[2],"dtype":"float32","trained":true}],"refused":"no"}',
        b'{"parameters":[{"size":[2],"dtype":"load","trained":true}]}',
        b'{"parameters":[{"size":[4000000000000,4000000000000],"dtype":"float32","trained":true}]}',
        b'{"parameters":[{"size":[99999999999999999999],"dtype":"float32","trained":true}]}',
        b'{"other":' + b"[" * 100_000,
        b'{"parameters":[{"size":[2],"dtype":"float32","trained":true}]' + b" " * (1 << 20) + b"}",
    ],
    ids=lambda content: content[:40].decode(),
)
def test_what_is_torn_or_foreign_is_built_again_and_written_over(
    content: bytes, tmp_path: Path, builds: Builds
) -> None:
    recipe = small(tmp_path)
    keep_outline(recipe, model())
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(content)
    keep_outline(recipe, outline_of(recipe))
    assert builds.times == 1 and file.read_bytes() == whole


@pytest.mark.skipif(sys.platform == "win32", reason="modes of directories")
def test_what_others_could_have_written_is_not_read(tmp_path: Path, builds: Builds) -> None:
    recipe = small(tmp_path)
    keep_outline(recipe, model())
    (tmp_path / "cache" / "outlines").chmod(0o777)
    outline_of(recipe)
    assert builds.times == 1


@pytest.mark.parametrize("spoil", [Path.touch, lambda path: path.symlink_to(path.parent / "other")])
def test_where_nothing_can_be_written_nothing_is_kept(
    spoil: Callable[[Path], None], tmp_path: Path, builds: Builds
) -> None:
    (tmp_path / "cache").mkdir()
    spoil(tmp_path / "cache" / "outlines")
    keep_outline(small(tmp_path), model())
    outline_of(small(tmp_path))
    assert builds.times == 1 and not (tmp_path / "cache" / "other").exists()


def test_the_newest_are_kept_and_what_was_left_half_written_goes(tmp_path: Path, builds: Builds) -> None:
    keep_outline(small(tmp_path), model())
    (first,) = files(tmp_path)
    others = [*(first.with_name(f"{i}.json") for i in range(40)), first.with_name(f".{first.name}.host-7")]
    for age, file in enumerate(others):
        file.touch()
        os.utime(file, (1e9 - age, 1e9 - age))
    keep_outline(small(tmp_path, "seed=2"), model())
    left = files(tmp_path)
    assert len(left) == outline.BOUNDS.files and first in left and others[-1] not in left


@pytest.mark.parametrize(("bound", "least"), [("seconds", 0.01), ("memory", 1 << 20), ("patience", 0.0)])
def test_a_model_that_takes_too_much_is_refused(bound: str, least: float, tmp_path: Path) -> None:
    bounds = replace(outline.BOUNDS, **{bound: least})  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"small\.yaml:2: base_model: its outline alone takes more than"):
        outline.outline_in_process(small(tmp_path), bounds)


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
