"""Files of axolotl brought here: what is said of each key, in one line each."""

from __future__ import annotations

import re

from swarmcli.errors import RecipeError
from swarmcli.recipe.elsewhere import HINTS

from .recipes import SMALL, refused, small

FULL = """\
base_model: HuggingFaceTB/SmolLM2-135M
model_type: AutoModelForCausalLM
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
val_set_size: 0.02
sequence_len: 2048
wandb_project:
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 2e-5
bf16: auto
warmup_ratio: 0.1
deepspeed: deepspeed_configs/zero2.json
special_tokens:
  pad_token: <|endoftext|>
mystery: 1
riddle: 2
adapter: qlora
"""
STEP = "an epoch here is one optimizer step of the whole swarm, not a pass over the data; write `max_epochs: …`, "
SAID = {
    2: "unknown key model_type; the class follows from the config of base_model and from task; remove it",
    5: "datasets.0.type should be one of 'text', 'completion' or 'chat_template', not 'alpaca'; make conversations",
    8: "unknown key wandb_project; each peer writes a journal, which `swarm monitor` shows",
    10: f"unknown key num_epochs; {STEP}3 × the number of samples / target_batch_size",
    11: "optimizer should be a section: keys indented below it, not 'adamw_torch'; "
    "write `optimizer: {name: adamw, learning_rate: 2e-5}`",
    12: "lr_scheduler should be a section: keys indented below it, not 'cosine'; "
    "write `lr_scheduler: {name: cosine, warmup_epochs: …}`",
    13: "unknown key learning_rate; did you mean optimizer.learning_rate? write it in the `optimizer:` above",
    14: "unknown key bf16; each volunteer chooses that; remove it, or write `local: {dtype: bfloat16}`",
    15: "unknown key warmup_ratio; write it in the `lr_scheduler:` above, 0.1 × max_epochs",
    16: "unknown key deepspeed; a peer holds the whole model, and `local.site` has several devices work",
    17: "unknown key special_tokens; they are the tokenizer's; remove it",
    19: "unknown key mystery; remove it; `swarm schema` lists the keys",
    20: "unknown key riddle; remove it; `swarm schema` lists the keys",
    21: "adapter should be 'lora', not 'qlora'; write `adapter: lora`, and keep `load_",
}


def test_each_key_of_the_file_that_cannot_stay_has_its_line_in_order() -> None:
    lines = refused(FULL).splitlines()
    assert [line.partition(";")[0] for line in lines[:2]] == [
        "small.yaml:1: run_id is missing", "small.yaml:1: target_batch_size is missing",
    ]  # fmt: skip
    told = lines[2:]
    assert len(told) == len(SAID), "\n".join(told)
    for line, (number, words) in zip(told, SAID.items(), strict=True):
        assert line.startswith(f"small.yaml:{number}: {words}")
    assert max(map(len, lines)) < 300


def test_the_lines_to_write_name_keys_and_values_that_exist() -> None:
    for key, hint in HINTS.items():
        value = "0.5" if "ratio" in key or "adam" in key else "a/b" if "hub" in key else "8"
        for line in re.findall(r"write `([^`]*)`", hint.format(value)):
            if "…" not in line:
                try:
                    small(text=SMALL + line)
                except RecipeError as error:  # what it needs beside it is not there
                    assert "unknown key" not in str(error), line
                    assert "should be" not in str(error), line
