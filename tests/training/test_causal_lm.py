from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from swarmcli.errors import RecipeError
from swarmcli.training import build_task

from .small_tasks import small


def build(directory: Path, *overrides: str) -> Any:
    return build_task(small(directory, *overrides)).build_model()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_initial_weights_depend_on_the_seed_alone_and_leave_the_callers_random_numbers_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first, drawn = build(tmp_path), torch.rand(4)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(4), drawn)
    assert same(first, build(tmp_path)) and not same(first, build(tmp_path, "seed=5"))


def test_vocabulary_and_positions_follow_the_recipe(tmp_path: Path) -> None:
    config = build(tmp_path).config
    assert (config.vocab_size, config.n_positions, config.eos_token_id) == (259, 16, 256)
    config = build(tmp_path, "base_model.vocab_size=300", "base_model.n_positions=64").config
    assert (config.vocab_size, config.n_positions) == (300, 64)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("base_model.model_type=gptt2", "unknown model_type 'gptt2'; did you mean gpt2?"),
        ("base_model.n_layers=2", "a gpt2 config has no field 'n_layers'; did you mean n_layer?"),
        ("base_model.auto_map={AutoConfig: evil.Config}", "a gpt2 config has no field 'auto_map'"),
        ("base_model.n_layer=two", "Field 'n_layer' expected int, got str (value: 'two')"),
        (
            "base_model.n_head=3",
            "correct what does not fit of its fields, or take another: it has vocab_size 259, n_embd 16, ",
        ),
        ("base_model.activation_function=foo", "transformers cannot build this model: it does not know 'foo'"),
        ("base_model={model_type: t5}", "this recipe trains causal language models; t5 is none; take one of gpt2, "),
        ("base_model={model_type: bert}", "bert is none; set is_decoder: true to have it read one way"),
        ("base_model.vocab_size=100", "the model knows 100 tokens, the tokenizer has 259; raise vocab_size"),
        ("base_model.n_positions=8", "the model reads 8 tokens at most, sequence_len is 16; lower sequence_len to 8"),
        ("base_model=gone", "gone is no directory with a saved model"),
    ],
)
def test_models_that_cannot_be_are_refused_with_the_place_in_the_recipe(
    tmp_path: Path, override: str, words: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        build(tmp_path, override)
    assert words in str(caught.value)
    assert str(caught.value).startswith((f"--set {override}: base_model: ", "small.yaml:2: base_model: "))


TINY = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
TINY_ENCODER_DECODER = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}


@pytest.mark.parametrize(
    ("model_type", "fields", "fits"),
    [
        ("bert", TINY, False),
        ("bert", {**TINY, "is_decoder": True}, True),
        ("xlnet", {"d_model": 16, "n_head": 2, "n_layer": 1, "d_inner": 32}, False),
        ("llama", TINY, True),
        ("bart", TINY_ENCODER_DECODER, True),
    ],
)
def test_a_model_is_taken_if_and_only_if_no_later_token_changes_what_it_predicts(
    tmp_path: Path, model_type: str, fields: dict[str, Any], fits: bool
) -> None:
    config = AutoConfig.for_model(model_type, **fields, vocab_size=300)
    tokens = torch.randint(3, 259, (1, 8), generator=torch.Generator().manual_seed(0))
    changed = torch.cat([tokens[:, :-1], (tokens[:, -1:] + 7) % 200 + 3], dim=1)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_config(config).eval()
        one_way = torch.allclose(model(tokens).logits[:, :-1], model(changed).logits[:, :-1], atol=1e-5)
    assert one_way is fits
    written = ", ".join(f"{key}: {str(value).lower()}" for key, value in fields.items())
    with nullcontext() if fits else pytest.raises(RecipeError, match="trains causal language models"):
        build(tmp_path, f"base_model={{model_type: {model_type}, {written}}}")


def save_with_code(directory: Path, marker: Path) -> None:
    directory.mkdir()
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "own.py").write_text(f"open({str(marker)!r}, 'w')\nraise ImportError('it ran')\n")


def test_code_in_a_checkpoint_runs_only_when_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    save_with_code(tmp_path / "own", tmp_path / "ran")
    with pytest.raises(RecipeError, match=r"local\.trust_remote_code"):
        build(tmp_path, "base_model=own")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(RecipeError, match="it ran"):
        build(tmp_path, "base_model=own", "local.trust_remote_code=true")
    assert (tmp_path / "ran").exists()


def test_weights_in_a_pickle_are_not_read(tmp_path: Path) -> None:
    model = build(tmp_path)
    model.config.save_pretrained(tmp_path / "pickled")
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(RecipeError, match="saved as safetensors"):
        build(tmp_path, "base_model=pickled")
