"""Adapters of peft beside a frozen base: what is trained, what is written down, and how a base comes to one."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForCausalLM

from swarmcli.errors import CheckpointError, RecipeError
from swarmcli.recipe import Recipe
from swarmcli.state.snapshot import PinnedState
from swarmcli.training import CheckpointStore, adapters, build_task, load_checkpoint, saved_buffers
from swarmcli.training.adapters import adapter_text, add_adapter, lacks_base, load_base, stored_tensors
from swarmcli.training.checkpoint import model_tensors
from swarmcli.training.demand import demand_of
from swarmcli.training.device import Compute, on_host
from swarmcli.training.freezing import frozen_bytes, run_weights
from swarmcli.training.memory import memory_needs
from tests.hub_stand_in import Hub, hub
from tests.training.small_tasks import outlined, small

__all__ = ["hub"]

LLAMA = "base_model={model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2}"  # noqa: E501
HEAD = "base_model.model.score.modules_to_save.default.weight"
CPU = torch.device("cpu")


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def build(recipe: Recipe, *, outline: bool = False) -> Any:
    return build_task(recipe).build_model(outline=outline)


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(each, other[name]) for name, each in one.items())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with a model in float32."""
    build(small(tmp_path, LLAMA)).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    "adapter",
    [
        ("adapter=lora", "lora_target_modules=all-linear", "peft_use_rslora=true", "lora_dropout=0.1"),
        ("adapter=lora", "lora_modules_to_save=[embed_tokens, lm_head]"),
        ("adapter=lora", "lora_target_modules=[q_proj, down_proj]", "peft_layers_to_transform=[1]"),
    ],
)
def test_only_an_adapter_is_trained_and_it_begins_alike_everywhere(
    tmp_path: Path, saved: Path, adapter: tuple[str, ...]
) -> None:
    recipe = small(tmp_path, "base_model=saved", *adapter)
    model = build(recipe)
    assert all(each.dtype == torch.float32 for each in trained(model).values())
    assert {each.dtype for each in model.parameters() if not each.requires_grad} == {torch.bfloat16}
    assert saved_buffers(model) == []
    outline = build(recipe, outline=True)
    assert [(each.shape, each.dtype, each.requires_grad) for each in outline.parameters()] == [
        (each.shape, each.dtype, each.requires_grad) for each in model.parameters()
    ]
    torch.manual_seed(7)  # whatever was drawn before
    assert equal(trained(build(recipe)), trained(model))
    task = build_task(recipe)
    task.loss(model, next(task.batches(1))).backward()
    assert all(each.grad is not None and each.grad.dtype == torch.float32 for each in trained(model).values())

    weights = stored_tensors(saved)
    for file in saved.glob("*.safetensors"):
        file.unlink()
    late = build(recipe)
    before = trained(late)
    assert lacks_base(late) and not lacks_base(model)
    load_base(recipe, late, weights, CPU)
    assert all(trained(late)[name] is each for name, each in before.items()), "an optimizer holds these"
    assert equal(dict(late.named_parameters()), dict(model.named_parameters())) and late.training


def test_checkpoints_are_pefts_own(tmp_path: Path, saved: Path) -> None:
    exactly = "base_model=saved", "local.base_dtype=float32"
    recipe = small(tmp_path, *exactly, "adapter=lora", "lora_modules_to_save=[lm_head]")
    model = build(recipe)
    with torch.no_grad():
        for each in trained(model).values():
            each.normal_()
    place = CheckpointStore(tmp_path / "kept", "small").write(model, {"swarm": {}}, 3)
    assert place is not None and not (place / "model.safetensors").exists()
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(saved), place).eval()
    assert equal(model_tensors(theirs), model_tensors(model))
    again, tokens = build(recipe), torch.arange(8)[None]
    load_checkpoint(place, "small").restore_model(again)
    assert equal(trained(again), trained(model))
    with torch.no_grad():
        mine, restored, their = (each.eval()(tokens).logits for each in (model, again, theirs))
    assert torch.equal(restored, mine)
    torch.testing.assert_close(mine, their)
    with pytest.raises(CheckpointError, match="of another model"):
        load_checkpoint(place, "small").restore_model(build(small(tmp_path, *exactly, "adapter=lora", "lora_r=4")))
    with pytest.raises(RecipeError, match=r"holds an adapter.*swarm export --merge"):
        build(small(tmp_path, f"base_model={place}"))


def test_what_a_volunteer_needs_and_sends_is_the_adapters(tmp_path: Path, saved: Path) -> None:
    recipe = small(tmp_path, "base_model=saved", "adapter=lora")
    outline = outlined(recipe)
    model = build(recipe)
    learns = sum(each.nbytes for each in trained(model).values())
    demand = demand_of(recipe, outline, "trainer")
    assert (demand.round, demand.state, demand.trained) == (learns, 3 * learns, learns // 4)
    assert demand.frozen == 2 * frozen_bytes(model), "its files are in float32"
    needs = {need.what: need.nbytes for need in memory_needs(recipe, outline, "trainer", Compute(CPU))}
    assert needs["parameters"] == sum(each.nbytes for each in model.parameters())
    assert needs["gradients"] == learns and needs["statistics of adamw"] == 2 * learns
    fewer = small(tmp_path, "base_model=saved", "adapter=lora", "load_in_4bit=true", "quantized_by=torchao==0.18.0")
    assert memory_needs(fewer, outline, "trainer", Compute(CPU))[1].nbytes < needs["parameters"]
    less = {need.what: need.nbytes for need in memory_needs(recipe, outline, "monitor", Compute(CPU))}
    assert less["copies of the state for a checkpoint"] == 5 * learns


@pytest.mark.parametrize(
    ("keys", "here", "says"),
    [
        (("load_in_8bit=true",), {"torchao": "0.18.0"}, "add for example `quantized_by: torchao==0.18.0`"),
        (("load_in_4bit=true", "quantized_by=torchao==0.17.0"), {}, "pip install torchao==0.17.0"),
        (("load_in_4bit=true", "quantized_by=torchao==0.17.0"), {"torchao": "0.18.0"}, r"0.18.0 is\); `pip install"),
    ],
)
def test_what_quantizes_has_to_be_the_one_that_the_recipe_names(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...], here: dict[str, str], says: str
) -> None:
    monkeypatch.setattr(adapters, "_installed", lambda package: here.get(package, ""))
    with pytest.raises(RecipeError, match=says):
        build(small(tmp_path, "base_model=saved", "adapter=lora", *keys))


def test_a_quantized_base_is_known_by_the_whole_weights(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for the package: transformers is asked to quantize, and what agrees are the whole weights."""
    monkeypatch.setattr(adapters, "_installed", lambda package: "0.50.2" if package == "bitsandbytes" else "")
    asked: dict[str, Any] = {}
    real = LlamaForCausalLM.from_pretrained.__func__

    def loaded(kind: Any, *args: Any, quantization_config: Any, device_map: Any, **options: Any) -> Any:
        asked.update(config=quantization_config, device=device_map)
        return real(kind, *args, **options)

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", classmethod(loaded))
    plain = small(tmp_path, "base_model=saved", "adapter=lora")
    chosen = "load_in_4bit=true", "quantized_by=bitsandbytes==0.50.2"
    recipe = small(tmp_path, "base_model=saved", "adapter=lora", *chosen)
    model = build(recipe)
    assert asked["config"].load_in_4bit and asked["device"] == {"": CPU}
    whole = LlamaForCausalLM.from_pretrained(saved, quantization_config=None, device_map=None)
    assert run_weights(recipe, model).own == run_weights(plain, whole).own


def test_a_copy_for_writing_and_evaluating_shares_the_base(tmp_path: Path, saved: Path) -> None:
    recipe = small(tmp_path, "base_model=saved", "adapter=lora", "lora_modules_to_save=[lm_head]")
    model, task = build(recipe), build_task(recipe)
    copied = on_host(model)
    for own, other in zip(model.parameters(), copied.parameters(), strict=True):
        assert (own.data_ptr() == other.data_ptr()) is not own.requires_grad
    batch = next(task.batches(1))
    with torch.no_grad():
        before = task.loss(model, batch)
        for each in trained(model).values():
            each.add_(1.0)
        assert torch.equal(task.loss(copied, batch), before) and not torch.equal(task.loss(model, batch), before)


def test_a_base_with_statistics_of_its_own_is_refused(tmp_path: Path) -> None:
    base = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(RecipeError, match="adapter: lora: the base has batch norms"):
        add_adapter(small(tmp_path, "adapter=lora"), base, None)


def test_a_base_of_files_computes_as_the_recipe_asks(tmp_path: Path, saved: Path) -> None:
    chosen = "local.attn_implementation=eager", "gradient_checkpointing=true", "local.base_dtype=float32"
    model = build(small(tmp_path, "base_model=saved", "adapter=lora", *chosen))
    plain = build(small(tmp_path, "base_model=saved", "adapter=lora", "local.base_dtype=float32"))
    assert model.config._attn_implementation == "eager" and model.get_base_model().is_gradient_checkpointing
    task = build_task(small(tmp_path, "base_model=saved", "adapter=lora"))
    batch = next(task.batches(1))
    for each in (model, plain):
        task.loss(each, batch).backward()
    for name, each in trained(model).items():
        torch.testing.assert_close(each.grad, trained(plain)[name].grad)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much of a mapped file is in memory")
def test_hashing_a_base_leaves_nothing_of_its_files_in_memory(tmp_path: Path) -> None:
    build(small(tmp_path, LLAMA, "base_model.vocab_size=50000")).save_pretrained(tmp_path / "saved")  # 6 MB
    file, mib = tmp_path / "saved" / "model.safetensors", 1 << 20
    recipe = small(tmp_path, "base_model=saved", "adapter=lora")
    model = build(recipe)
    frozen = run_weights(recipe, model)

    def resident() -> int:
        maps = psutil.Process().memory_maps(grouped=False)
        return sum(each.rss for each in maps if each.path == str(file))

    assert resident() < mib  # the kernel maps some pages around those of the header
    assert PinnedState(replace(frozen.snapshot(), digests=())).digests and resident() > 5 * mib


def test_a_base_of_the_hub_is_known_by_name_and_commit(tmp_path: Path, saved: Path, hub: Hub) -> None:
    commit = hub.push("acme/tiny", saved)
    chosen = "tokenizer=bytes", "adapter=lora"
    recipe = small(tmp_path, "base_model=acme/tiny", f"revision={commit}", *chosen)
    model, local = build(recipe), build(small(tmp_path, "base_model=saved", *chosen))
    assert equal(dict(model.named_parameters()), dict(local.named_parameters()))
    assert run_weights(recipe, model).own == run_weights(small(tmp_path, "base_model=saved", *chosen), local).own
    told, silent = json.loads(adapter_text(model)), json.loads(adapter_text(local))
    assert (told["base_model_name_or_path"], told["revision"]) == ("acme/tiny", commit)
    assert (silent["base_model_name_or_path"], silent["revision"]) == (None, None)


def test_a_head_that_the_base_lacks_begins_alike_and_is_trained_in_float32(tmp_path: Path, saved: Path) -> None:
    kind, recipe = AutoModelForSequenceClassification, small(tmp_path, "base_model=saved", "adapter=lora")
    config = AutoConfig.from_pretrained(saved, num_labels=3, pad_token_id=0)

    def made(auto_class: str = kind.__name__) -> Any:
        with torch.device("meta"):
            base = kind.from_config(config, dtype=torch.bfloat16)
        return adapters.adapted(recipe, base, auto_class, outline=False)

    model = made()
    assert equal(trained(made()), trained(model)) and HEAD in trained(model)
    loss = model(input_ids=torch.arange(1, 9).view(2, 4), labels=torch.tensor([0, 2])).loss
    loss.backward()
    assert loss.dtype == torch.float32 and all(each.grad is not None for each in trained(model).values())
    kind.from_config(AutoConfig.from_pretrained(saved, num_labels=5)).save_pretrained(saved)
    assert trained(made())[HEAD].shape[0] == 3, "the files have a head of other labels"
    with pytest.raises(RecipeError, match=r"no score.weight of its shape.*name its module in lora_modules_to_save"):
        made("AutoModel")


def test_a_base_of_a_config_is_made_by_the_seed_and_a_module_that_it_lacks_refused_by_its_name(tmp_path: Path) -> None:
    exact = small(tmp_path, LLAMA, "adapter=lora", "local.base_dtype=float32")
    first, second = (dict(build(exact).named_parameters()) for _ in range(2))
    assert equal(first, second) and {each.dtype for each in first.values()} == {torch.float32}
    with pytest.raises(RecipeError, match="the base has no module 'lm_hed'; did you mean lm_head"):
        build(small(tmp_path, LLAMA, "adapter=lora", "lora_modules_to_save=[lm_hed]"))
