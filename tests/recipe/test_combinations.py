"""Which keys go together, and what is said of those that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from swarmcli.errors import RecipeError
from swarmcli.recipe import HuggingFaceDataset, Recipe, differing_keys, digest_of, fingerprint_of, offered
from swarmcli.recipe.document import arms, at
from swarmcli.recipe.problems import all_keys, as_written
from swarmcli.recipe.section import selectors_of
from swarmcli.training.adapters import KEYS, adapter_fields

from .recipes import SMALL, refused, small

CHAT = "datasets.0={path: chats.jsonl, type: chat_template}"
FOUR = "local.site.processes=4"
LOCAL = "local_updates.enabled=yes"
TOPK, MEMBERS = "gradient_averaging.method=topk", "trust: members"
OUTER = "outer={optimizer: nesterov, inner_batch_size: 8}"
FLASH = "local.attn_implementation=flash_attention_2"
SPLIT = "evaluation={every_epochs: 5, dataset: {source: huggingface, path: a/b, split: validation}}"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["gradient_averaging.method=signsgd"], "should be one of 'plain', 'powersgd', 'poweref' or 'topk'"),
        ([LOCAL, "ema_decay=0.9"], "weights are averaged over epochs where all peers hold them alike, and here"),
        ([TOPK], "topk needs members who trust each other: no aggregator bounds what a stranger sends in sparse parts"),
        ([TOPK], "add averaging.trust: members or access: invite, or use method: plain"),
        (
            [f"averaging={{{MEMBERS}, aggregator: {{name: median}}}}", TOPK, "averaging.aggregator.name=trimmed_mean"],
            "a median of sparse parts is zero nearly everywhere; use aggregator.name: mean with topk",
        ),
        ([f"averaging={{{MEMBERS}}}", TOPK, "compression.gradients=float16"], "topk says in gradient_averaging.bits"),
        ([f"averaging={{{MEMBERS}}}", TOPK, "averaging.target_group_size=8"], "topk needs one group of all peers,"),
        (["delay={grad_averaging: yes, optimizer_step: no}"], "a step cannot come before its gradients are averaged"),
        (["gradient_averaging.method=powersgd", "averaging.target_group_size=8"], "powersgd needs one group of all"),
        (["averaging.target_group_size=8", "compression.state_averaging=float16"], "several groups have no common"),
        (["averaging.aggregator={name: centered_clip, radius: 0}"], "averaging.aggregator.radius should be above 0"),
        (["gradient_averaging.method=powersgd", "averaging.aggregator.name=median"], "powersgd takes its matrices"),
        (["averaging.average_opt_statistics=[exp_avgs]"], "adamw keeps no statistic 'exp_avgs'; it has exp_avg and"),
        (["averaging.compression=float16"], "unknown key averaging.compression; did you mean compression.gradients?"),
        ([LOCAL, "gradient_averaging.method=plain"], "local updates average parameters, never gradients; remove"),
        ([LOCAL, "compression.gradients=float16"], "local updates send no gradients; set compression.state_averaging"),
        ([LOCAL, "delay.grad_averaging=yes"], "local updates step after every batch and wait for nobody then"),
        (["outer.optimizer=sgd"], "outer.inner_batch_size is missing; add `inner_batch_size: …`"),
        ([OUTER, LOCAL], "local_updates.enabled has no use with outer steps: it is another way to train; remove it"),
        ([f"averaging={{{MEMBERS}}}", TOPK, OUTER], "method: topk, whose peers keep what they have not sent, while"),
        (
            [f"averaging={{{MEMBERS}}}", TOPK, "outer={optimizer: adam, momentum: 0, inner_batch_size: 8}"],
            "outer.momentum and adam do not go with gradient_averaging.method: topk",
        ),
        ([OUTER, "gradient_averaging.method=poweref"], "gradient_averaging.method has no use with outer steps"),
        ([OUTER, "delay.grad_averaging=yes"], "trainers go on during a round in any case"),
        ([OUTER, "averaging.average_state_every=2"], "all peers have the same anchor"),
        ([OUTER, "averaging.target_group_size=8"], "one anchor needs one group"),
        ([OUTER, "local.offload_optimizer=yes"], "the optimizer makes steps of the model itself"),
        ([OUTER, "local.site.processes=2"], "a peer that makes them is one process"),
        (["local.site.proceses=4"], "unknown key local.site.proceses; did you mean processes?"),
        (["local.site.zero=yes"], "set processes to 2 or more"),
        ([FOUR, LOCAL, "local.site.hierarchy={2: 4}"], "unknown key local.site.hierarchy; the processes of a site tak"),
        ([FOUR, "delay.grad_averaging=yes", "local.site.zero=yes"], "and delay keeps the optimizer in host memory; re"),
        ([FOUR, "local.offload_optimizer=yes", "local.site.zero=yes"], "and local.offload_optimizer keeps it in host"),
        ([FOUR, "ema_decay=0.9", "local.site.zero=yes"], "with zero no process has the whole optimizer, and ema_decay"),
        ([FOUR, "averaging.average_opt_statistics=[exp_avg_sq]", "local.site.zero=yes"], "and averaging.average_opt_s"),
        ([FOUR, "local.device=cuda:1"], "cuda:1 is one device, and the site has 4 processes; write cuda"),
        (["datasets.0.type=chat_template"], "not 'chat_template'; a text file has no conversations in it; write them"),
        ([CHAT, "datasets.0.field_message=a"], "unknown key datasets.0.field_message; did you mean field_messages?"),
        (["chat_template=chatml"], "no dataset has conversations; set type: chat_template in one of datasets"),
        ([CHAT, "datasets.0.chat_template=chatml", "chat_template=chatml"], "each dataset with type: chat_template"),
        ([CHAT, "chat_template=llama3"], "chat_template: 'llama3' is no template; write chatml, a Jinja template, or"),
        (["evaluation.every_epochs=5"], "an evaluation needs data that nobody trains on; add `held_out: 0.02`"),
        (["evaluation={held_out: 0.1, dataset: {source: stdlib}}"], "remove held_out, or dataset"),
        (["evaluation.early_stopping_patience=3"], "the run is never evaluated; set every_epochs"),
        (
            ["evaluation={held_out: 0.1, every_epochs: 5, early_stopping_patience: 3}"],
            "which you trust, says when the run ends; name a monitor of yours by `evaluator: PEER_ID`",
        ),
        (["evaluation={held_out: 0.1, every_epochs: 5, evaluator: ada}"], "'ada' is no peer id: expected 52"),
        (["val_set_size=0.1"], "nothing evaluates on what it holds out; add `evaluation: {every_epochs"),
        (["evaluation={every_epochs: 5, held_out: 0.1}", "val_set_size=0.1"], "the same as evaluation.held_out"),
        (
            ["datasets=[{source: files, path: t}]", "evaluation.dataset={source: files, path: t, weight: 2}"],
            "the run trains on this dataset; name another one",
        ),
        (
            ["task=masked_lm", "datasets=[{path: a.jsonl, type: chat_template}]"],
            "remove datasets.0.type, or take task: ",
        ),
        (
            ["datasets=[{path: imagefolder, data_files: [p/**]}]"],
            "imagefolder gives images, and causal_lm reads texts;",
        ),
        (["lr_scheduler.name=cosine"], "a cosine schedule needs an end; add max_epochs or lr_scheduler.total_epochs"),
        (["lr_scheduler={name: linear, warmup_epochs: 5, total_epochs: 5}"], "a warm-up of 5 epochs does not fit into"),
        (["sample_packing=true", FLASH], "keeps the rows of packed samples apart only where a batch is one sample"),
        (["adapter=loha"], "adapter should be 'lora', not 'loha'"),
        (["adapter=lora", "peft={r: 4}"], "unknown key peft; what can be said of LoRA has keys of its own"),
        (["adapter=lora", "lora_target_modules=['']"], "lora_target_modules.0 should be given, and not empty"),
        (["adapter=lora", "lora_target_modules='(a+)+b'"], "lora_target_modules should be a list like [a, b], not"),
        (["adapter=lora", "unfrozen_parameters=[lm_head]"], "with an adapter nothing of the base is trained"),
        (["adapter=lora", "local.site.processes=2"], "a site of several processes trains no adapter"),
        (["adapter=lora", "load_in_8bit=true"], "only weights of a saved model are quantized; name one as base_model,"),
        (["adapter=lora", "base_model=x", "load_in_8bit=true", "load_in_4bit=true"], "in 8 bits or in 4"),
        (["optimizer={name: adamw, args: {amsgard: true}}"], "adamw takes no argument 'amsgard' here;"),
        (["optimizer={name: muon, args: {ns_steps: 2.5}}"], "ns_steps is 2.5; it is usually 5"),
        (
            ["optimizer={groups: [{match: lm_head}]}"],
            "unknown key optimizer.groups; all parameters have one learning_rate",
        ),
        (["lr_scheduler={name: warmup_stable_decay}"], "warmup_stable_decay needs decay_epochs"),
        (["optimizer={name: sgd, args: {momentum: 0.9}}"], "momentum stands one level up; write `optimizer.momentum: "),
        (
            ["lr_scheduler={pieces: [{epochs: 1, start: 0, end: 1}]}"],
            "unknown key lr_scheduler.pieces; a schedule has a",
        ),
        (["datasets.0={path: a.csv, encoding: cp1252}"], "unknown key datasets.0.encoding; files are UTF-8 here; save"),
        (
            ["base_model=./here", "revision=main"],
            "revision is a commit of a base_model of the Hugging Face Hub; remove it",
        ),
        (["tokenizer=models/b", "tokenizer_revision=main"], "tokenizer_revision is a commit of a tokenizer of the"),
        (["include=base.yaml"], "unknown key include; a recipe is one file; write the keys of base.yaml here"),
    ],
)
def test_what_cannot_go_together_is_refused_where_it_is_written(overrides: list[str], words: str) -> None:
    said = refused(SMALL, *overrides)
    assert words in said and said.startswith(f"--set {overrides[-1]}")


VALUES = {  # of keys that are off by default
    "lora_target_modules": "all-linear", "lora_modules_to_save": "[lm_head]", "peft_use_rslora": "yes",
    "peft_layers_to_transform": "[0]", "load_in_8bit": "yes", "load_in_4bit": "yes", "quantized_by": "torchao==0.9",
    "tokenizer": "bytes", "labels": "[a, b]", "sequence_len": "8", "sample_packing": "yes", "chat_template": "chatml",
    "total_epochs": "9", "decay_epochs": "2", "lr": "0.5", "momentum": "0.5", "inner_batch_size": "8",
    "message_property_mappings": "{role: from, content: said}",
}  # fmt: skip
BESIDE = {
    "adapter": "null",
    "optimizer": "null",
    "task": "image_classification",
    "sample_packing": "seq2seq",
    "labels": "causal_lm",
}
KEYS_OF = {key: selectors_of(info) for key, info in all_keys(Recipe).items() if "evaluation" not in key}
SELECTED = {key: selectors for key, selectors in KEYS_OF.items() if selectors}


@pytest.mark.parametrize("key", SELECTED)
def test_a_key_is_refused_beside_each_value_with_which_it_means_nothing_and_told_where_it_belongs(key: str) -> None:
    section, _, name = key.replace("datasets.", "datasets.0.").rpartition(".")
    here = f"{section}." if section else ""
    value = VALUES.get(name) or as_written(all_keys(Recipe)[key].default)
    rows = ["datasets.0={path: a.jsonl}"] if section == "datasets.0" else []
    ((selector, values),) = SELECTED[key].items()
    model = HuggingFaceDataset if rows else at(Recipe, section.split(".") if section else [])
    annotation = model.model_fields[selector]
    others = {each for arm in arms(annotation.annotation) for each in get_args(arm)} - {*values}
    others = others or {BESIDE.get(name) or BESIDE[selector]}
    for other in others:
        said = refused(SMALL, *rows, f"{here}{selector}={other}", f"{here}{name}={value}")
        without = "without" if other == "null" else f"beside {selector}: {other}"
        assert f"--set {here}{name}={value}: {here}{name} has no meaning {without}" in said
        assert all(each in said.partition("; remove it, or take ")[2] for each in values)


def test_sparse_gradients_are_for_members_and_have_means_also_of_outer_steps() -> None:
    recipe = small("averaging.trust=members", "gradient_averaging={method: topk, k: 128, bits: 8, decay: 1}")
    settings = recipe.gradient_averaging
    assert (settings.k, settings.bits, settings.decay, recipe.aggregator) == (128, 8, 1.0, "mean")
    recipe = small("averaging.trust=members", TOPK, "outer={optimizer: sgd, momentum: 0, inner_batch_size: 8}")
    assert recipe.outer.takes_steps and recipe.gradient_averaging.method == "topk"


def test_delayed_averaging_delays_the_step_too_and_both_need_an_optimizer_in_host_memory() -> None:
    delayed = small("delay.grad_averaging=yes")
    assert delayed.delay.step and delayed.offloaded
    step_only = small("delay.optimizer_step=yes")
    assert step_only.delay.step and not step_only.delay.grad_averaging and step_only.offloaded
    assert small("local.offload_optimizer=yes").offloaded


def test_an_inner_step_is_made_up_of_whole_batches_and_an_outer_one_of_many() -> None:
    recipe = small("micro_batch_size=2", "outer={optimizer: adam, lr: 0.1, inner_batch_size: 8}")
    assert recipe.outer.takes_steps and recipe.outer.has_momentum
    said = refused(SMALL, "local.micro_batch_size=3", "outer={optimizer: sgd, inner_batch_size: 8}")
    assert "an inner step of 8 samples is not made up of 3 × 1" in said and "set local.micro_batch_size" in said
    said = refused(SMALL, "micro_batch_size=1", "target_batch_size=16", "outer={optimizer: sgd, inner_batch_size: 32}")
    assert "is larger than an outer step of the whole swarm (16); raise target_batch_size" in said


def test_a_line_is_named_where_a_file_contradicts_itself() -> None:
    text = f"{SMALL}local_updates:\n  enabled: true\n"
    assert refused(f"{text}delay:\n  optimizer_step: true\n").startswith("small.yaml:14: local updates step after")


def test_what_goes_together_is_taken() -> None:
    """Beside the kept recipes of test_fingerprint.py."""
    recipe = small(SPLIT, "datasets=[{source: huggingface, path: a/b}]")
    assert isinstance(recipe.evaluation.dataset, HuggingFaceDataset) and recipe.evaluation.dataset.split == "validation"
    talks = "evaluation={every_epochs: 1, dataset: {path: chats.jsonl, type: chat_template}}"
    assert small(talks, "chat_template=chatml").chat_template == "chatml"
    assert small("sample_packing=true", FLASH, "local.micro_batch_size=1").micro_batch == 1
    assert small("sample_packing=true", "local.attn_implementation=sdpa").micro_batch > 1


def test_a_link_brings_no_program(tmp_path: Path) -> None:
    for key in ("chat_template", "datasets.0.chat_template"):
        with pytest.raises(RecipeError, match=f"{key} is a program that volunteers would run; write chatml"):
            offered(small(CHAT, f"{key}='{{{{ messages }}}}'"))
    assert json.loads(offered(small(CHAT, "chat_template=chatml")))["chat_template"] == "chatml"


@pytest.mark.parametrize("differs", ["every_epochs=6", "samples=9", f"evaluator={'a' * 52}"])
def test_what_is_measured_and_who_ends_the_run_must_agree(differs: str) -> None:
    held = "evaluation={held_out: 0.02, every_epochs: 5}"
    assert digest_of(small(held)) != digest_of(small(held, f"evaluation.{differs}"))
    named = held[:-1] + f", evaluator: {'a' * 52}, early_stopping_patience: "
    assert len({digest_of(small(each)) for each in (held, named + "2}", named + "3}")}) == 3
    assert digest_of(small("evaluation.held_out=0.02")) != digest_of(small())
    assert digest_of(small(SPLIT)) != digest_of(small())


def test_keys_are_the_fields_that_peft_has_for_them() -> None:
    from peft import LoraConfig

    assert set(KEYS.values()) <= LoraConfig.__dataclass_fields__.keys()


def test_what_a_recipe_says_becomes_those_fields() -> None:
    recipe = small("adapter=lora", "lora_r=4", "lora_target_modules=[c_attn]", "peft_layers_to_transform=[0]")
    fields = adapter_fields(recipe)
    assert (fields["r"], fields["target_modules"], fields["layers_to_transform"]) == (4, ["c_attn"], [0])
    assert "lora_r" in differing_keys(fingerprint_of(recipe), fingerprint_of(small("adapter=lora")))
