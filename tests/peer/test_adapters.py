"""Whole roles in one process: runs that train an adapter, whose base comes from the run where it is lacking."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from swarmcli.cli.export import export
from swarmcli.cli.generate import load
from swarmcli.errors import CheckpointError, RecipeError, StateDownloadError
from swarmcli.events import RoundFinished
from swarmcli.optim.state.frozen import FILE, StoredWeights
from swarmcli.peer import collaboration
from swarmcli.recipe import Recipe
from swarmcli.training import build_task, load_checkpoint
from swarmcli.training.adapters import stored_tensors
from swarmcli.training.merging import merge

exporting = typer.Typer()
exporting.command()(export)


def save_base(directory: Path, seed: int = 3) -> str:
    """A model in bfloat16; its digest as an adapter's base."""
    config = AutoConfig.for_model(
        "llama", hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=259,
        max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    return StoredWeights(lambda: stored_tensors(directory), "", None, lambda tensors: None, 0).digest


@pytest.fixture
def models(start: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, nn.Module]:
    """The models of the peers, by their names."""
    made: dict[str, nn.Module] = {}

    def build(recipe: Recipe) -> Any:
        task = build_task(recipe)

        def build_model(*, outline: bool = False) -> nn.Module:
            model = type(task).build_model(task, outline=outline)
            if not outline:
                made[recipe.local.name] = model
            return model

        task.build_model = build_model
        return task

    monkeypatch.setattr(collaboration, "build_task", build)
    # A process of its own would find out the same, in seconds.
    monkeypatch.setattr(collaboration, "outline_of", lambda recipe: build_task(recipe).build_model(outline=True))
    return made


@pytest.fixture
def settings(tmp_path: Path) -> tuple[str, ...]:
    digest = save_base(tmp_path / "base")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(tmp_path / "base" / "config.json", bare)
    return ("tokenizer=bytes", "adapter=lora", f"frozen_weights={digest}", "lora_r=4", "optimizer.learning_rate=0.01")


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}


def test_all_end_with_one_adapter_over_the_runs_base_whatever_base_they_had_and_who_adds_up_needs_none(
    start: Any, models: dict[str, nn.Module], settings: tuple[str, ...], tmp_path: Path
) -> None:
    save_base(tmp_path / "other", seed=4)
    whole, other, bare = (f"base_model={tmp_path / name}" for name in ("base", "other", "bare"))
    settings = (*settings, "max_epochs=16")
    # It may come into no round beside epochs that are so quick; that it has the run's shapes is shown by its living on.
    helper = start("helper", role="auxiliary", settings=(bare, *settings))
    first = start("first", helper, settings=(whole, *settings))
    second = start("second", first, settings=(other, *settings))
    first.reach(2)
    late = start("late", first, settings=(bare, *settings))
    for peer in (first, second, late):
        peer.end()
    helper.leave()
    assert late.epochs[0].epoch > 1 and any("frozen weights" in text and "came from" in text for text in late.notices)
    own = trained(models["first"])
    for name in ("second", "late"):
        assert all(torch.equal(each, own[key]) for key, each in trained(models[name]).items())
        assert all(
            torch.equal(a, b) for a, b in zip(models[name].parameters(), models["first"].parameters(), strict=True)
        )
    assert any(each.any() for key, each in own.items() if "lora_B" in key), "nothing was learned"
    adapter = sum(each.nbytes for each in own.values())
    rounds = [event for event in first.events if isinstance(event, RoundFinished) and event.bytes_sent]
    assert rounds and max(event.bytes_sent for event in rounds) < 2 * adapter + 20_000
    assert (late.home / FILE).exists() and not (first.home / FILE).exists()


def test_a_monitor_without_the_base_gets_it_and_writes_the_adapter(
    start: Any, models: dict[str, nn.Module], settings: tuple[str, ...], tmp_path: Path
) -> None:
    first = start("first", settings=(f"base_model={tmp_path / 'base'}", *settings))
    first.reach(2)
    bare = f"base_model={tmp_path / 'bare'}"
    watcher = start("watcher", first, role="monitor", settings=(bare, *settings))
    watcher.reach(first.epoch + 1)
    first.leave()
    place = Path(watcher.leave().rpartition(" at ")[2])
    adapter = sum(each.nbytes for each in trained(models["first"]).values())
    assert sum(each.nbytes for each in load_checkpoint(place).model.values()) == adapter
    assert sum(file.stat().st_size for file in place.glob("*.safetensors")) < 3 * adapter + 20_000
    assert all(torch.equal(a, b) for a, b in zip(base_of(models["watcher"]), base_of(models["first"]), strict=True))


def base_of(model: nn.Module) -> list[torch.Tensor]:
    return [each for each in model.parameters() if not each.requires_grad]


def test_nobody_has_the_base(
    start: Any, models: dict[str, nn.Module], settings: tuple[str, ...], tmp_path: Path
) -> None:
    alone = start("alone", settings=(f"base_model={tmp_path / 'bare'}", "averaging.load_state_timeout=1", *settings))
    with pytest.raises(StateDownloadError, match=r"this computer lacks the run's frozen weights, .* nobody gives them"):
        alone.end()


def test_a_base_made_of_a_config_is_as_good(start: Any, models: dict[str, nn.Module]) -> None:
    settings = ("adapter=lora", "lora_target_modules=[c_attn]")
    with pytest.raises(RecipeError, match=r"adapter.*are not trained, and have to be the same") as told:
        start("first", settings=settings).end()
    named = re.search("frozen_weights: ([0-9a-f]{64})", str(told.value))
    assert named is not None
    settings = (*settings, f"frozen_weights={named[1]}")
    first = start("first", settings=settings)
    first.reach(1)
    second = start("second", first, settings=settings)
    second.reach(first.epoch + 1)
    assert (first.home / FILE).exists(), "generating and merging find it there"
    for peer in (first, second):  # whose bases may be unlike at first: they draw from one generator, in two threads
        peer.leave()
    assert all(torch.equal(a, b) for a, b in zip(base_of(models["second"]), base_of(models["first"]), strict=True))


def test_the_average_of_an_adapter_writes_unless_the_last_one_is_asked_for(
    start: Any, models: dict[str, nn.Module], settings: tuple[str, ...], tmp_path: Path
) -> None:
    base = f"base_model={tmp_path / 'base'}"
    first = start("first", settings=(base, "ema_decay=0.9", "local.base_dtype=float32", *settings))
    first.reach(3)
    place = Path(first.leave().rpartition(" at ")[2])
    averages = load_file(place / "adapter_model.ema.safetensors")
    for raw, expected in ((False, averages), (True, load_file(place / "adapter_model.safetensors"))):
        loaded = get_peft_model_state_dict(load(place, last_epoch=raw)[0])
        assert all(torch.equal(loaded[name], each) for name, each in expected.items())
        merge(place, tmp_path / f"whole-{raw}", last_epoch=raw)
    assert not any(torch.equal(each, loaded[name]) for name, each in averages.items() if "lora_B" in name)
    whole = [(tmp_path / f"whole-{raw}" / "model.safetensors").read_bytes() for raw in (False, True)]
    assert whole[0] != whole[1]


def test_what_was_learned_is_read_merged_and_written_with_anywhere(
    start: Any, models: dict[str, nn.Module], settings: tuple[str, ...], tmp_path: Path
) -> None:
    first = start("first", settings=(f"base_model={tmp_path / 'base'}", "local.base_dtype=float32", *settings))
    first.reach(3)
    place = Path(first.leave().rpartition(" at ")[2])
    assert "peft" in (place / "README.md").read_text()
    model, tokenizer = load(place)
    assert tokenizer("a")["input_ids"] == [97] and model.dtype == torch.bfloat16
    merge(place, tmp_path / "whole")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert whole.dtype == torch.bfloat16, "as its base was"
    assert load(tmp_path / "whole")[1]("a")["input_ids"] == [97]
    with pytest.raises(CheckpointError, match="holds something already"):
        merge(place, tmp_path / "whole")

    elsewhere = tmp_path / "elsewhere" / place.name
    shutil.copytree(place, elsewhere)
    save_base(tmp_path / "other", seed=4)
    with pytest.raises(CheckpointError, match="no place that has it: name the directory of the saved model by --base"):
        load(elsewhere)
    with pytest.raises(CheckpointError, match="other is not it"):
        load(elsewhere, tmp_path / "other")
    merge(elsewhere, tmp_path / "again", tmp_path / "base")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()
    ran = CliRunner().invoke(
        exporting, ["--merge", str(elsewhere), "--base", str(tmp_path / "base"), "-o", str(tmp_path / "by")]
    )
    assert ran.exit_code == 0 and (tmp_path / "by" / "tokenizer.json").exists(), ran.output
    assert not (tmp_path / "by" / "checkpoint.json").exists()
    with pytest.raises(CheckpointError, match="holds a whole model"):
        merge(tmp_path / "whole", tmp_path / "no")
