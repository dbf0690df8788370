"""One rule for sums, whatever the task: the mean over all that a step learns, however it is cut into micro-batches."""

from __future__ import annotations

import re
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmcli.recipe import Recipe, parse_recipe
from swarmcli.training import LoopSettings, TrainingLoop, build_task
from swarmcli.training.tasks import causal_lm

from .small_tasks import TALK, SoloOptimizer, write_rows

GPT2 = "{model_type: gpt2, n_layer: 1, n_head: 2, n_embd: 16, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0}"
BART = (
    "{model_type: bart, d_model: 16, decoder_layers: 1, decoder_attention_heads: 2, decoder_ffn_dim: 16, dropout: 0.0, "
    "is_decoder: true}"
)
MIXTRAL = (
    "{model_type: mixtral, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, "
    "intermediate_size: 16, num_local_experts: 4, output_router_logits: true, router_aux_loss_coef: 0.5}"
)
TEXTS = [{"text": "ab" * (1 + 3 * n), "messages": TALK[: 2 + 2 * (n % 2)]} for n in range(8)]


def recipe_for(directory: Path, task: str, model: str, rows: Any, *overrides: str) -> Recipe:
    write_rows(directory / "rows.jsonl", *rows)
    text = f"""\
run_id: sums
task: {task}
base_model: {model}
datasets: [{{path: rows.jsonl}}]
sequence_len: 96
target_batch_size: 8
micro_batch_size: 8
local: {{device: cpu, shuffle_buffer_size: 8}}
"""
    return parse_recipe(text, overrides, name="sums.yaml", directory=directory)


@pytest.mark.parametrize("kind", ["text", "completion", "chat_template"])
@pytest.mark.parametrize("more", ["sample_packing=true", "label_smoothing_factor=0.1"])
def test_what_routers_add_to_the_loss_is_kept_and_padding_is_not_routed(tmp_path: Path, kind: str, more: str) -> None:
    overrides = [f"datasets.0.type={kind}", *(["chat_template=chatml"] if kind == "chat_template" else []), more]
    task: Any = build_task(recipe_for(tmp_path, "causal_lm", MIXTRAL, TEXTS, *overrides))
    model, batch = task.build_model(), dict(next(task.batches(1)))
    # The load that the Mixtral paper balances, of plain transformers: without padding, and without labels.
    if "position_ids" in batch:
        del batch["attention_mask"]
    labels = batch.pop("labels", batch["input_ids"])[:, 1:]
    outputs = model(**batch)
    expected = functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels.flatten(), label_smoothing=task.recipe.label_smoothing_factor
    )
    assert outputs.aux_loss > 1
    torch.testing.assert_close(
        task.loss(model, next(task.batches(1))), expected + 0.5 * outputs.aux_loss, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kind", ["text", "completion"])
def test_a_decoder_that_leaves_labels_in_their_place_learns_the_next_token(tmp_path: Path, kind: str) -> None:
    task: Any = build_task(recipe_for(tmp_path, "causal_lm", BART, TEXTS, f"datasets.0.type={kind}"))
    model, batch = task.build_model(), next(task.batches(1))
    labels = batch.get("labels", batch["input_ids"])[:, 1:]
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    torch.testing.assert_close(
        task.loss(model, batch), functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    )


def test_all_decoders_that_leave_labels_in_their_place_are_known() -> None:
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as listed

    models = Path(str(find_spec("transformers").origin)).parent / "models"  # type: ignore[union-attr]
    found = set()
    for name, model in listed.items():
        for file in (models / model_type_to_module_name(name)).glob("modeling_*.py"):
            body = re.search(rf"\nclass {model}\(.*?(?=\nclass |\Z)", file.read_text(), re.DOTALL)
            if body and "loss_function(" not in body[0]:
                found.add(name)
    composite = {"gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"}  # refused
    assert found == {*causal_lm._LABELS_IN_PLACE, *causal_lm._PADS_IN_FRONT, "xlm", "xlnet"} | composite
