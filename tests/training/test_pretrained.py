"""Models of the Hub by a commit, against a stand-in for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmcli.errors import HubUnreachable, RecipeError
from swarmcli.recipe import Recipe, differing_keys, fingerprint_of, parse_recipe
from swarmcli.training.tasks import build_task
from swarmcli.training.tokenizer import ByteTokenizer
from tests.hub_stand_in import Hub, hub

from .small_tasks import outlined

__all__ = ["hub"]

SMALL_FILES = {"config.json", "tokenizer.json", "tokenizer_config.json"}
TEXT = "run_id: small\ndatasets:\n  - source: stdlib\nsequence_len: 16\ntarget_batch_size: 32\n"
TINY = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 259}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as transformers saves it, with its tokenizer, a pickle and code that nobody is to load."""
    from transformers import AutoConfig, AutoModelForCausalLM

    place = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(7)
    fields: dict[str, Any] = dict(TINY)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).save_pretrained(place)
    ByteTokenizer().save(place)
    (place / "pytorch_model.bin").write_bytes(b"a pickle")
    (place / "modeling.py").write_text("raise SystemExit")
    return place


def recipe_of(*lines: str, directory: Path | None = None) -> Recipe:
    return parse_recipe(TEXT + "".join(f"{line}\n" for line in lines), name="small.yaml", directory=directory)


def named(commit: str, *more: str) -> Recipe:
    return recipe_of("base_model: acme/tiny", f"revision: {commit}", *more)


def test_a_model_of_the_hub_begins_with_its_weights_and_its_tokenizer(hub: Hub, tiny: Path, tmp_path: Path) -> None:
    recipe = named(hub.push("acme/tiny", tiny))
    fingerprint = fingerprint_of(recipe)
    assert set(hub.downloads()) == SMALL_FILES, "the fingerprint needs no weights"
    local = recipe_of(f"base_model: {tiny}")
    assert differing_keys(fingerprint, fingerprint_of(local)) == ["revision"]
    outline = outlined(recipe)
    assert set(hub.downloads()) == SMALL_FILES, "neither does the outline"
    task = build_task(recipe)
    model, same = task.build_model(), build_task(local).build_model()
    assert [p.shape for p in outline.parameters()] == [p.shape for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    assert not getattr(model, "lacks_weights", False)
    assert next(iter(task.batches(0)))["input_ids"].shape[1] == 16
    assert set(hub.downloads()) == {*SMALL_FILES, "model.safetensors", "generation_config.json"}, "no pickle, no code"
    hub.leave()
    assert fingerprint_of(recipe) == fingerprint and build_task(recipe).build_model() is not None, "all of it is here"


def test_a_name_of_the_hub_without_a_commit_is_refused_with_the_commit(hub: Hub, tiny: Path) -> None:
    commit = hub.push("acme/tiny", tiny)
    for lines, key in (
        (["base_model: acme/tiny"], "revision"),
        (["base_model: acme/tiny", "revision: main"], "revision"),
        ([f"base_model: {tiny}", "tokenizer: acme/tiny"], "tokenizer_revision"),
        ([f"base_model: {tiny}", "tokenizer: acme/tiny", "tokenizer_revision: main"], "tokenizer_revision"),
    ):
        with pytest.raises(RecipeError, match=rf"small.yaml:\d+: \w+: .*write `{key}: {commit}`"):
            fingerprint_of(recipe_of(*lines))
    assert hub.downloads() == []
    with pytest.raises(RecipeError, match="'acme/none' is no directory here, and the Hub has no model acme/none"):
        fingerprint_of(recipe_of("base_model: acme/none"))
    hub.leave()
    with pytest.raises(RecipeError, match=r"cannot be fetched.*write `revision: ` and a commit of https://"):
        fingerprint_of(recipe_of("base_model: acme/tiny"))


def test_what_the_hub_does_not_have_is_refused_by_key_or_said_to_be_lacking(hub: Hub, tiny: Path) -> None:
    commit = hub.push("acme/tiny", tiny)
    with pytest.raises(RecipeError, match=r"small.yaml:7: revision: acme/tiny has no commit 0000"):
        fingerprint_of(named("0" * 40))
    with pytest.raises(RecipeError, match=r"small.yaml:6: base_model: the Hub has no model acme/none"):
        fingerprint_of(recipe_of("base_model: acme/none", f"revision: {commit}"))
    seen, other = named(commit), named(hub.push("acme/tiny", tiny))
    assert differing_keys(fingerprint_of(seen), fingerprint_of(other)) == ["revision"]
    unseen = named(hub.push("acme/tiny", tiny))
    hub.leave()
    with pytest.raises(HubUnreachable, match=r"base_model: acme/tiny cannot be fetched .*; connect this computer"):
        fingerprint_of(unseen)
    model: Any = build_task(seen).build_model()  # of its config
    assert model.lacks_weights is True


def test_a_model_without_safetensors_is_refused(hub: Hub, tiny: Path) -> None:
    files = {name: (tiny / name).read_bytes() for name in (*SMALL_FILES, "pytorch_model.bin")}
    recipe = named(hub.push("acme/tiny", files))
    with pytest.raises(RecipeError, match=r"base_model: acme/tiny has no safetensors at .* pickles are not loaded"):
        build_task(recipe).build_model()


def test_weights_that_are_too_large_for_the_config_are_not_downloaded(hub: Hub, tiny: Path) -> None:
    files = {path.name: path.read_bytes() for path in tiny.iterdir()} | {"model-2.safetensors": bytes(65 << 20)}
    with pytest.raises(RecipeError, match=r"acme/tiny has weights of 65 MiB, and its config is of a model of 64"):
        build_task(named(hub.push("acme/tiny", files))).build_model()
    assert "model.safetensors" not in hub.downloads()


def test_what_another_program_fetched_in_part_is_made_whole(hub: Hub, tiny: Path) -> None:
    from huggingface_hub import hf_hub_download

    commit = hub.push("acme/tiny", tiny)
    hf_hub_download("acme/tiny", "config.json", revision=commit)
    hf_hub_download("acme/tiny", "tokenizer.json", revision=commit)
    whole = recipe_of(f"base_model: {tiny}")
    assert differing_keys(fingerprint_of(named(commit)), fingerprint_of(whole)) == ["revision"]


def test_the_tokenizer_may_be_another_ones_or_bytes(hub: Hub, tiny: Path, tmp_path: Path) -> None:
    commit = hub.push("acme/tiny", tiny)
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(RecipeError, match=r"tokenizer: .* is no directory with a saved tokenizer .*`tokenizer: bytes`"):
        fingerprint_of(recipe_of(f"base_model: {config}"))
    assert build_task(recipe_of(f"base_model: {config}", "tokenizer: bytes")).build_model() is not None
    other = recipe_of(f"base_model: {config}", "tokenizer: acme/tiny", f"tokenizer_revision: {commit}")
    task: Any = build_task(other)
    assert task.tokenizer.encode("a").tolist() == [97]
    same = named(commit, "tokenizer: acme/tiny")
    assert differing_keys(fingerprint_of(named(commit)), fingerprint_of(same)) == []


def test_composite_models_are_refused_by_name(tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("gemma3").save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"gemma3 is a composite model, with a .*vision_config"):
        build_task(recipe_of(f"base_model: {tmp_path}", "tokenizer: bytes")).build_model(outline=True)
