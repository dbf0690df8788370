"""An adapter merged into its base computes what both computed beside each other, for every kind of model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, LoraModel, get_peft_model
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from swarmcli.errors import CheckpointError
from swarmcli.optim.state.frozen import StoredWeights
from swarmcli.training import CheckpointStore
from swarmcli.training.adapters import stored_tensors
from swarmcli.training.merging import merge

pytestmark = pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|fan_in_fan_out)")  # peft's, on what this tests
WORDS = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = WORDS | {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA = TEXT | {"model_type": "llama", "tie_word_embeddings": True}
T5 = WORDS | {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
BART = WORDS | {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
BART |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
GPT2 = WORDS | {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16}
VIT = TEXT | {"model_type": "vit", "image_size": 8, "patch_size": 4, "num_labels": 3}
TOKENS = torch.tensor([[1, 7, 30, 59, 2]])


def adapted(directory: Path, auto: str, fields: Mapping[str, Any], dtype: torch.dtype, lora: Mapping[str, Any]) -> Any:
    """A model with an adapter that has learned, in float32, beside a base that is saved in `dtype`."""
    kind = getattr(transformers, f"AutoModelFor{auto}")
    torch.manual_seed(3)
    base = kind.from_config(transformers.AutoConfig.for_model(**fields), dtype=dtype)
    for each in base.parameters():
        each.data.add_(0.2 * torch.randn_like(each))
    base.save_pretrained(directory / "base")
    model: Any = get_peft_model(kind.from_pretrained(directory / "base", dtype=torch.float32), LoraConfig(r=2, **lora))
    for each in model.parameters():
        if each.requires_grad:
            each.data.add_(0.3 * torch.randn_like(each))
    return model.eval()


def checkpoint_of(directory: Path, model: Any) -> Path:
    base = StoredWeights(lambda: stored_tensors(directory / "base"), "", None, lambda tensors: None, 0)
    place = CheckpointStore(directory / "home" / "checkpoints", "small").write(
        model, {"swarm": {"frozen_weights": base.digest}}, 1
    )
    assert place is not None
    return place


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    if model.main_input_name == "pixel_values":
        found: torch.Tensor = model(pixel_values=torch.linspace(-1, 1, 192).view(1, 3, 8, 8)).logits
        return found
    decoder = {"decoder_input_ids": TOKENS} if model.config.is_encoder_decoder else {}
    found = model(input_ids=TOKENS, **decoder).logits
    return found


@pytest.mark.parametrize(
    ("auto", "fields", "dtype", "lora", "tied"),
    [
        ("CausalLM", LLAMA, torch.float32, {"target_modules": ["q_proj", "lm_head"]}, False),
        ("CausalLM", LLAMA, torch.bfloat16, {"target_modules": ["embed_tokens"]}, False),
        ("CausalLM", LLAMA, torch.float16, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
        ("CausalLM", LLAMA, torch.float32, {"target_modules": ["q_proj"], "use_rslora": True}, True),
        ("CausalLM", GPT2 | {"n_positions": 5}, torch.float32, {"target_modules": ["c_attn", "lm_head"]}, False),
        ("MaskedLM", TEXT | {"model_type": "bert"}, torch.float32, {"target_modules": ["decoder"]}, False),
        # transformers ties what its files hold once, whatever the config says: here the flag has another meaning
        ("Seq2SeqLM", T5, torch.float32, {"target_modules": ["q"], "modules_to_save": ["shared"]}, True),
        ("Seq2SeqLM", BART, torch.float32, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
        ("SequenceClassification", LLAMA, torch.bfloat16, {"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}, True),
        ("TokenClassification", T5, torch.float32, {"target_modules": ["q"], "task_type": "TOKEN_CLS"}, True),
        ("ImageClassification", VIT, torch.float32, {"target_modules": "all-linear"}, None),
    ],
)
def test_a_merged_model_computes_what_base_and_adapter_do(
    tmp_path: Path, auto: str, fields: Mapping[str, Any], dtype: torch.dtype, lora: Mapping[str, Any], tied: bool | None
) -> None:
    model = adapted(tmp_path, auto, fields, dtype, lora)
    place = checkpoint_of(tmp_path, model)
    if auto == "ImageClassification":
        ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(place)
    merge(place, tmp_path / "whole", tmp_path / "base")
    whole = getattr(transformers, f"AutoModelFor{auto}").from_pretrained(tmp_path / "whole")
    assert (whole.dtype, getattr(whole.config, "tie_word_embeddings", None)) == (dtype, tied)
    expected = logits(model)
    # Each weight is rounded to its type once.
    rounding = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(logits(whole.float()), expected, rtol=0, atol=rounding * float(expected.abs().max()))


@pytest.mark.parametrize(("factor", "says"), [(1e6, "differ by nan"), (1.0, "computes something else")])
def test_what_would_be_another_model_is_refused_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, says: str
) -> None:
    model = adapted(tmp_path, "CausalLM", LLAMA, torch.float16, {"target_modules": ["lm_head"]})
    for each in model.parameters():
        if each.requires_grad:
            each.data.mul_(factor)  # beyond what float16 holds
    place = checkpoint_of(tmp_path, model)
    if factor == 1.0:
        monkeypatch.setattr(LoraModel, "merge_and_unload", LoraModel.unload)
    with pytest.raises(CheckpointError, match=f"{says}.*; use it as an adapter, by peft"):
        merge(place, tmp_path / "whole", tmp_path / "base")
    assert not list((tmp_path / "whole").iterdir())
