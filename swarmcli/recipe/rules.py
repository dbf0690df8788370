"""Finds what does not go together in a recipe: keys that mean nothing beside the value of another key, and values that
contradict each other. Each is told with the key to point at, the reason and the fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swarmcli.recipe.dataset import AnyDataset, HuggingFaceDataset
from swarmcli.recipe.optimizers import OPTIMIZERS
from swarmcli.recipe.patterns import MODEL_ON_HUB
from swarmcli.recipe.section import Section, selectors_of
from swarmcli.recipe.task_names import BUILT_IN

if TYPE_CHECKING:
    from swarmcli.recipe.schema import Recipe

Contradictions = Iterator[tuple[str, str]]  # the path of a key, and what is said of it


def without_meaning(section: Section, path: str = "") -> Contradictions:
    """Yields the keys that are written where they mean nothing, by the selectors of the schema. Values that switch
    something off pass: files of other trainers have them too."""
    for name, info in type(section).model_fields.items():
        value, key = getattr(section, name), f"{path}{name}"
        if isinstance(value, Section):
            yield from without_meaning(value, f"{key}.")
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            for index, item in enumerate(value):
                yield from without_meaning(item, f"{key}.{index}.")
        elif name in section.model_fields_set and value is not None and value is not False and value != ():
            yield from ((key, f"{key} {said}") for said in _beside_selectors(section, selectors_of(info)))


def _beside_selectors(section: Section, selectors: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for selector, values in selectors.items():
        chosen = getattr(section, selector)
        # Another package's task knows itself what it reads.
        if chosen in values or (selector == "task" and chosen not in BUILT_IN):
            continue
        beside = f"beside {selector}: {chosen}" if chosen else f"without {selector}"
        choices = " or ".join(filter(None, [", ".join(values[:-1]), values[-1]]))
        yield f"has no meaning {beside}; remove it, or take {selector}: {choices}"


def conflicts_in(recipe: Recipe) -> Contradictions:
    """Yields all that contradicts something else."""
    yield from _of_model(recipe)
    yield from _of_data(recipe)
    yield from _of_evaluation(recipe)
    yield from _of_schedule(recipe)
    yield from _of_steps(recipe)
    yield from _of_averaging(recipe)
    yield from _of_site(recipe)


def _of_model(recipe: Recipe) -> Contradictions:
    base, of_saved = recipe.base_model, "load_in_4bit" if recipe.load_in_4bit else "load_in_8bit"
    quantized = recipe.load_in_4bit or recipe.load_in_8bit
    if isinstance(base, Mapping) and not isinstance(base.get("model_type"), str):
        yield "base_model", "base_model lacks model_type; add for example `model_type: gpt2`"
    if recipe.access == "invite" and recipe.run_key is None:
        yield "access", "a key of the run signs invitations; add the run_key that `swarm init --invite` makes"
    for key, of, name in (
        ("revision", "base_model", base),
        ("tokenizer_revision", "tokenizer", recipe.tokenizer),
    ):
        if getattr(recipe, key) is not None and not (isinstance(name, str) and MODEL_ON_HUB.fullmatch(name)):
            yield key, f"{key} is a commit of a {of} of the Hugging Face Hub; remove it, or write `{of}: owner/name`"
    if recipe.load_in_8bit and recipe.load_in_4bit:
        yield of_saved, "a base is loaded in 8 bits or in 4; remove one of load_in_8bit and load_in_4bit"
    if recipe.quantized_by and not quantized:
        yield "quantized_by", "nothing is quantized; add load_in_8bit or load_in_4bit, or remove quantized_by"
    if quantized and isinstance(base, Mapping):
        yield of_saved, f"only weights of a saved model are quantized; name one as base_model, or remove {of_saved}"
    if recipe.adapter and recipe.unfrozen_parameters:
        fix = "name modules in lora_modules_to_save, or remove it"
        yield "unfrozen_parameters", f"with an adapter nothing of the base is trained; {fix}"
    if recipe.adapter and recipe.local.site.processes > 1:
        fix = "start one peer for each device"
        yield "local.site.processes", f"a site of several processes trains no adapter; {fix}"


def _of_data(recipe: Recipe) -> Contradictions:
    name, task = recipe.task, BUILT_IN.get(recipe.task)
    if len(set(recipe.labels)) < len(recipe.labels):
        yield "labels", "labels: one of them is there twice; each class needs a name of its own"
    if task and task.texts and not recipe.sequence_len:
        yield "sequence_len", "sequence_len is missing; add `sequence_len: …` (tokens per sample)"
    if task and task.labelled and len(recipe.labels) < 2:
        yield "labels", f"labels: {name} needs the names of two classes or more; add `labels: [negative, positive]`"
    items = {f"datasets.{index}": dataset for index, dataset in enumerate(recipe.datasets)}
    items |= {} if recipe.evaluation.dataset is None else {"evaluation.dataset": recipe.evaluation.dataset}
    for where, item in items.items():
        if task and name != "causal_lm" and item.type != "text":
            yield f"{where}.type", f"{name} reads no rows so; remove {where}.type, or take task: causal_lm"
        if not isinstance(item, HuggingFaceDataset):
            continue
        if task and task.texts and item.path == "imagefolder":
            fix = "name texts, or take task: image_classification"
            yield f"{where}.path", f"{where}.path: imagefolder gives images, and {name} reads texts; {fix}"
    # With flash_attention_2, transformers finds the borders of rows only in a batch of one sample.
    if recipe.sample_packing and recipe.local.attn_implementation == "flash_attention_2" and recipe.micro_batch > 1:
        fix = "set local.micro_batch_size: 1 (and raise local.gradient_accumulation_steps), or take sdpa"
        why = "flash_attention_2 keeps the rows of packed samples apart only where a batch is one sample"
        yield "local.attn_implementation", f"{why}; {fix}"
    chats = [item for item in items.values() if isinstance(item, HuggingFaceDataset) and item.type == "chat_template"]
    if recipe.chat_template is not None and all(chat.chat_template is not None for chat in chats):
        fix = "each dataset with type: chat_template has a template of its own; remove one of the two"
        none = "no dataset has conversations; set type: chat_template in one of datasets, or remove it"
        yield "chat_template", fix if chats else none


def _of_evaluation(recipe: Recipe) -> Contradictions:
    evaluation, every = recipe.evaluation, min(50, recipe.max_epochs or 50)  # above max_epochs it would never come
    if evaluation.dataset is not None and evaluation.held_out:
        yield "evaluation.held_out", "the run evaluates on a dataset of its own; remove held_out, or dataset"
    if recipe.val_set_size and (evaluation.held_out or evaluation.dataset is not None):
        key = "held_out" if evaluation.held_out else "dataset"
        yield "val_set_size", f"it says the same as evaluation.{key}; remove one of the two"
    if recipe.val_set_size and not evaluation.every_epochs:
        fix = f"add `evaluation: {{every_epochs: {every}}}`"
        yield "val_set_size", f"nothing evaluates on what it holds out; {fix}"
    if evaluation.every_epochs and not recipe.held_out and evaluation.dataset is None:
        fix = "add `held_out: 0.02` for a share, or name a dataset"
        yield "evaluation.every_epochs", f"an evaluation needs data that nobody trains on; {fix}"
    if (own := evaluation.dataset) is not None and any(_rows_of(each) == _rows_of(own) for each in recipe.datasets):
        yield "evaluation.dataset", "the run trains on this dataset; name another one, or take `held_out: 0.02`"
    if evaluation.early_stopping_patience and not evaluation.every_epochs:
        yield "evaluation.early_stopping_patience", "the run is never evaluated; set every_epochs"
    elif evaluation.early_stopping_patience and evaluation.evaluator is None:
        fix = "name a monitor of yours by `evaluator: PEER_ID` (its link begins with it, swarm://PEER_ID@…)"
        yield "evaluation.early_stopping_patience", f"one peer, which you trust, says when the run ends; {fix}"
    if recipe.checkpoint.upload.when == "best" and not evaluation.every_epochs:
        yield "checkpoint.upload.when", "nothing is evaluated, so nothing is best; set evaluation.every_epochs, or each"


def _rows_of(dataset: AnyDataset) -> dict[str, Any]:
    """Returns the values that choose the rows of a dataset."""
    return dataset.model_dump(include={"source", "path", "glob", "name", "split", "data_files"})


def _of_schedule(recipe: Recipe) -> Contradictions:
    schedule, end = recipe.lr_scheduler, recipe.lr_scheduler.total_epochs or recipe.max_epochs
    warmup, decay = schedule.warmup_epochs, schedule.decay_epochs or 0
    if schedule.name == "warmup_stable_decay" and not decay:
        yield "lr_scheduler.decay_epochs", f"{schedule.name} needs decay_epochs; add how many epochs the rate falls"
    elif schedule.ends and end is None:
        fix = "add max_epochs or lr_scheduler.total_epochs"
        yield "lr_scheduler.name", f"lr_scheduler.name: a {schedule.name} schedule needs an end; {fix}"
    elif schedule.ends and end and warmup + decay >= end:
        what = f"a warm-up of {warmup} epochs" if warmup else "a decay"
        beside = f" and {decay} of decay" if decay else ""
        key = "decay_epochs" if warmup < end else "warmup_epochs"
        yield f"lr_scheduler.{key}", f"{what}{beside} does not fit into {end}; make it shorter than that"


def _of_steps(recipe: Recipe) -> Contradictions:
    target, inner, optimizer = recipe.target_batch_size, recipe.outer.inner_batch_size, recipe.optimizer.name
    step = recipe.micro_batch * recipe.accumulation_steps
    in_words = f"{recipe.micro_batch} × {recipe.accumulation_steps}"
    if step > target:  # each would overshoot the epoch
        own = [key for key in ("micro_batch_size", "gradient_accumulation_steps") if getattr(recipe.local, key)]
        fix = f"lower micro_batch_size or gradient_accumulation_steps to at most {target} samples together"
        said = f"a step of {in_words} samples is larger than an epoch of the whole swarm"
        yield f"local.{own[0]}" if own else "micro_batch_size", f"{said}; {fix}, or raise target_batch_size"
    if recipe.outer.optimizer and not inner:
        said = "outer.inner_batch_size is missing; add `inner_batch_size: …`, samples of a peer's own step"
        yield "outer.inner_batch_size", said
    elif recipe.outer.optimizer and inner % step:
        fix = "set local.micro_batch_size to one of its divisors"
        product = f"{in_words} (micro_batch_size × gradient_accumulation_steps)"
        yield "outer.inner_batch_size", f"an inner step of {inner} samples is not made up of {product}; {fix}"
    elif inner > target:
        fix = "raise target_batch_size to many inner steps"
        larger = f"is larger than an outer step of the whole swarm ({target})"
        yield "outer.inner_batch_size", f"an inner step of {inner} samples of one peer {larger}; {fix}"
    known = OPTIMIZERS[optimizer].statistics
    for each in (each for each in recipe.averaging.average_opt_statistics if each not in known):
        said = f"{optimizer} keeps no statistic {each!r}; it has {' and '.join(known)}"
        yield "averaging.average_opt_statistics", said
    if recipe.delay.grad_averaging and recipe.delay.optimizer_step is False:
        fix = "remove it, or set grad_averaging: false"
        yield "delay.optimizer_step", f"a step cannot come before its gradients are averaged; {fix}"


def _of_averaging(recipe: Recipe) -> Contradictions:
    if recipe.way == "outer steps":
        yield from _beside_outer_steps(recipe)
    elif recipe.way == "local updates":
        yield from _beside_local_updates(recipe)
    method, codec, several = recipe.gradient_averaging.method, recipe.compression, recipe.averaging.target_group_size
    if several is not None and method != "plain":
        shares = "which share what it compresses with"
        if method == "topk":
            shares = "since after rounds of several ones whole states are averaged"
        fix = "remove target_group_size, or use method: plain"
        yield "averaging.target_group_size", f"{method} needs one group of all peers, {shares}; {fix}"
    elif several is not None and recipe.way != "local updates" and codec.state_averaging != "none":
        said = f"several groups have no common average from which {codec.state_averaging} could tell small differences"
        yield "compression.state_averaging", f"{said}; remove it, or averaging.target_group_size"
    if method in ("powersgd", "poweref") and recipe.aggregator != "mean":
        said = f"{method} takes its matrices apart and puts them together again, which only means survive"
        yield "averaging.aggregator.name", f"{said}; use aggregator.name: mean, or gradient_averaging.method: plain"
    if method != "topk":
        return
    if recipe.trust == "strangers":
        said = "topk needs members who trust each other: no aggregator bounds what a stranger sends in sparse parts"
        fix = "add averaging.trust: members or access: invite, or use method: plain"
        yield "gradient_averaging.method", f"{said}; {fix}"
    elif recipe.aggregator != "mean":
        yield (
            "averaging.aggregator.name",
            "a median of sparse parts is zero nearly everywhere; use aggregator.name: mean with topk",
        )
    if codec.gradients != "none":
        said = "topk says in gradient_averaging.bits how gradients travel; remove compression.gradients"
        yield "compression.gradients", said


def _beside_local_updates(recipe: Recipe) -> Contradictions:
    of_gradients = recipe.gradient_averaging.model_fields_set
    waits, delay = "local updates step after every batch and wait for nobody then", recipe.delay
    no_use = {
        f"gradient_averaging.{min(of_gradients, default='')}": (
            of_gradients,
            "local updates average parameters, never gradients; remove gradient_averaging",
        ),
        "compression.gradients": (
            "gradients" in recipe.compression.model_fields_set,
            "local updates send no gradients; set compression.state_averaging instead",
        ),
        "ema_decay": (
            recipe.ema_decay,
            "weights are averaged over epochs where all peers hold them alike, and here each has its own; remove it",
        ),
        "delay.grad_averaging": (delay.grad_averaging, f"{waits}; set delay.state_averaging instead"),
        "delay.optimizer_step": (delay.optimizer_step, f"{waits}; set delay.state_averaging instead"),
    }
    yield from ((key, f"{said}, or local_updates.enabled: false") for key, (given, said) in no_use.items() if given)


def _beside_outer_steps(recipe: Recipe) -> Contradictions:
    method = recipe.gradient_averaging.method
    if method == "topk" and recipe.outer.has_momentum:
        said = "outer.momentum and adam do not go with gradient_averaging.method: topk, whose peers keep what they have"
        why = "not sent, while a momentum applies again what they have"
        key = "outer.momentum" if recipe.outer.momentum else "outer.optimizer"
        yield key, f"{said} {why}; write outer.optimizer: sgd alone"
    goes_on = "trainers go on during a round in any case"
    no_use = {
        "gradient_averaging.method": (method in ("powersgd", "poweref"), "no gradients are averaged"),
        "local_updates.enabled": (recipe.local_updates.enabled, "it is another way to train"),
        "averaging.target_group_size": (recipe.averaging.target_group_size, "one anchor needs one group"),
        "averaging.average_state_every": (recipe.averaging.average_state_every, "all peers have the same anchor"),
        "delay.grad_averaging": (recipe.delay.grad_averaging, goes_on),
        "delay.optimizer_step": (recipe.delay.optimizer_step, goes_on),
        "local.offload_optimizer": (recipe.local.offload_optimizer, "the optimizer makes steps of the model itself"),
        "local.site.processes": (recipe.local.site.processes > 1, "a peer that makes them is one process"),
    }
    for key, (given, reason) in no_use.items():
        if given:
            yield key, f"{key} has no use with outer steps: {reason}; remove it, or remove outer"


def _of_site(recipe: Recipe) -> Contradictions:
    local, site = recipe.local, recipe.local.site
    if site.processes > 1 and (local.device == "mps" or ":" in local.device):
        fix = "write cuda (a device for each process), cpu or auto"
        yield "local.device", f"{local.device} is one device, and the site has {site.processes} processes; {fix}"
    if site.zero and site.processes == 1:
        yield "local.site.zero", "zero shares the optimizer among a site's processes; set processes to 2 or more"
    needs_all = {  # these need all statistics of the optimizer in one place, and with zero there is none
        "delay keeps the optimizer in host memory": recipe.delay.step,
        "local.offload_optimizer keeps it in host memory": local.offload_optimizer,
        "averaging.average_opt_statistics averages them": recipe.averaging.average_opt_statistics,
        "ema_decay averages the weights over epochs": recipe.ema_decay,
        "muon steps two kinds of parameters, whatever zero deals out": recipe.optimizer.name == "muon",
    }
    for reason, given in needs_all.items() if site.zero else ():
        if given:
            yield (
                "local.site.zero",
                f"with zero no process has the whole optimizer, and {reason}; remove zero",
            )
