"""The README.md of a checkpoint: what the model is, what it has read, and how to load it.

A recipe comes from a stranger and the card is read by others' tools, so every text of the recipe is quoted: as YAML in
the front matter, as a code span below it. Paths of a machine are shortened to their last name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml

from swarmcli.errors import RecipeError
from swarmcli.events import Evaluated
from swarmcli.recipe import AnyDataset, FilesDataset, HuggingFaceDataset, Recipe, StdlibDataset, offered
from swarmcli.recipe.dataset import LOCAL_BUILDERS
from swarmcli.recipe.task_names import BUILT_IN, mean_in_words
from swarmcli.training.task import Task
from swarmcli.training.tasks import built_in

_URL = re.compile(r"([A-Za-z][\w+.-]*://)(?:[^/?#]*@)?([^?#]*)", re.ASCII)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


# A recipe may be long, and the card is a page.
_MOST_TEXT = 200  # characters of one text of the recipe
_MOST_ITEMS = 20  # datasets, and files of one dataset, that are listed
_PIPELINE = """\
from transformers import pipeline

use = pipeline("{}", model="path/to/this/directory")
print(use(…))"""
_GENERATION = """\
from transformers import {0}, AutoTokenizer

directory = "path/to/this/directory"
tokenizer = AutoTokenizer.from_pretrained(directory)
model = {0}.from_pretrained(directory)
inputs = tokenizer("Once upon a time", return_tensors="pt")
tokens = model.generate(**inputs, max_new_tokens=20)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))"""
_USES = {
    "causal_lm": _GENERATION.format("AutoModelForCausalLM"),
    "seq2seq": _GENERATION.format("AutoModelForSeq2SeqLM"),  # transformers 5 has no pipeline for it
}
_ADAPTER = """\
from peft import PeftModel
from transformers import AutoConfig, {0}

config = AutoConfig.from_pretrained("path/to/this/directory")
base = {0}.from_pretrained("path/to/the/base", config=config{1})
model = PeftModel.from_pretrained(base, "path/to/this/directory")"""


def describe_model(
    directory: Path, recipe: Recipe, task: Task, epoch: int, samples: int | None, **at_present: Any
) -> None:
    """Completes a directory with a saved model for its users: adds the files of the task's tokenizer or image
    processor, the card, and the recipe as links bring it, if a link can bring it.

    See `model_card` for the figures. Raises OSError, and what the task's tokenizer raises.
    """
    task.save_preprocessing(directory)
    (directory / "README.md").write_text(model_card(recipe, epoch, samples, **at_present), encoding="utf-8")
    with suppress(RecipeError):
        (directory / "recipe.yaml").write_text(offered(recipe), encoding="utf-8")


def model_card(
    recipe: Recipe,
    epoch: int,
    samples: int | None,
    trainers: int | None,
    began: str = "",
    measured: Evaluated | None = None,
) -> str:
    """Returns the card of the model that `recipe` had come to at `epoch`, as Markdown with YAML front matter.

    `samples` of all peers so far, and `trainers` at this moment; None: not known. `began`: the former run that this one
    goes on from, in words. `measured`: how good this very model is on data that nobody trains on; None: not measured.
    """
    header = yaml.safe_dump(_front_matter(recipe, measured), sort_keys=False, allow_unicode=False)
    told = _facts(recipe, epoch, samples, trainers) | ({"went on from": _code(began)} if began else {})
    if measured is not None:
        told["on data kept aside"] = _code(measured.sentence)
    facts = "\n".join(f"- {name}: {value}" for name, value in told.items())
    data = "\n".join(f"- {line}" for line in _data(recipe))
    return f"""\
---
{header}---

# {_code(recipe.run_id)}, epoch {epoch}

A checkpoint of a model that several computers train together with swarm. This page was written with it.

{facts}

## What it has read

By the run's recipe, which every peer has agreed to; nobody has looked at the texts themselves:

{data}

## Loading it

{_loading(recipe)}
"""


def _loading(recipe: Recipe) -> str:
    if recipe.task not in BUILT_IN:
        return f"By the code that brings the task {_code(recipe.task)}."
    if recipe.adapter is not None:
        # The head of a base may have other classes.
        head = ", ignore_mismatched_sizes=True" if recipe.labels else ""
        use = _ADAPTER.format(built_in(recipe.task).kind.auto, head)
        return (
            "It is an adapter, beside the base with which it was trained; `swarm export --merge` makes one of both:"
            f"\n\n```python\n{use}\n```"
        )
    use = _USES.get(recipe.task, _PIPELINE.format(BUILT_IN[recipe.task].pipeline))
    return f"Nothing but transformers is needed, no code from elsewhere and no network:\n\n```python\n{use}\n```"


def _front_matter(recipe: Recipe, measured: Evaluated | None) -> dict[str, Any]:
    """Returns a card's metadata as the Hub reads them. YAML quotes every value that a recipe can choose."""
    # Imported here: a process that writes no card need not wait for it.
    from huggingface_hub import EvalResult, ModelCardData

    hub = [d.path for d in recipe.datasets if isinstance(d, HuggingFaceDataset) and d.path not in LOCAL_BUILDERS]
    named = [path for path in hub if _HUB_NAME.fullmatch(path)]
    pipeline = BUILT_IN[recipe.task].pipeline if recipe.task in BUILT_IN else None
    data = _public(getattr(recipe.evaluation.dataset, "path", "data that no peer trains on"))
    numbers = {"loss": measured.loss, **measured.metrics} if measured is not None else {}
    results = [
        EvalResult(pipeline or "other", data, data, name, value)
        for name, value in numbers.items()
        if math.isfinite(value)
    ]
    told = ModelCardData(
        license=recipe.license or "unknown",
        language=list(recipe.language) or None,
        library_name="peft" if recipe.adapter else "transformers",
        pipeline_tag=pipeline,
        tags=["swarm", *recipe.tags],
        base_model=str(recipe.base_model) if recipe.revision else None,
        datasets=named[:_MOST_ITEMS] or None,
        model_name=recipe.run_id,
        eval_results=results or None,
    )
    return told.to_dict()


def _facts(recipe: Recipe, epoch: int, samples: int | None, trainers: int | None) -> dict[str, str]:
    base = recipe.base_model
    tokenizer = recipe.tokenizer or (base if isinstance(base, str) else "bytes")
    began = f"weights of {_code(_public(base))}" if isinstance(base, str) else f"random {_code(base['model_type'])}"
    began += f" at {_code(recipe.revision)}" if recipe.revision else ""
    return {
        "run": _code(recipe.run_id),
        "epochs (steps of the optimizer)": f"{epoch}",
        "samples": "unknown" if samples is None else f"{samples:,}, of all peers together",
        "task": f"{_code(recipe.task)}; losses are means over {mean_in_words(recipe.task)}",
        **({"sequence length": f"{recipe.sequence_len} tokens a sample"} if recipe.sequence_len else {}),
        "trainers": "unknown" if trainers is None else f"{trainers} when this was written",
        **({"adapter": f"{recipe.adapter}, beside {began}"} if recipe.adapter else {"began with": began}),
        **({"tokenizer": _code(_public(tokenizer))} if recipe.sequence_len else {}),
        **({"labels": ", ".join(map(_code, recipe.labels[:_MOST_ITEMS]))} if recipe.labels else {}),
        "licence": _code(recipe.license or "unknown; ask whoever began the run, and mind those of the texts"),
    }


def _data(recipe: Recipe) -> Iterator[str]:
    for dataset in recipe.datasets[:_MOST_ITEMS]:
        weight = f", weight {dataset.weight:g}" if len(recipe.datasets) > 1 else ""
        yield _describe(dataset) + weight
    if len(recipe.datasets) > _MOST_ITEMS:
        yield f"and {len(recipe.datasets) - _MOST_ITEMS} more"


def _describe(dataset: AnyDataset) -> str:
    if isinstance(dataset, StdlibDataset):
        return "the sources of Python's standard library"
    if isinstance(dataset, FilesDataset):
        return f"text files {_code(dataset.glob)} of {_code(_public(dataset.path))}"
    parts = [f"dataset {_code(_public(dataset.path))}", f"split {_code(dataset.split)}"]
    parts += [f"configuration {_code(dataset.name)}"] if dataset.name else []
    parts += [f"revision {_code(dataset.revision)}"] if dataset.revision else []
    if files := [_code(_public(file)) for file in dataset.data_files[:_MOST_ITEMS]]:
        more = len(dataset.data_files) - len(files)
        parts.append("files " + " ".join(files) + (f" and {more} more" if more else ""))
    return ", ".join(parts)


def _public(text: str) -> str:
    """Returns a text without what is private in it: directories of a machine, credentials and queries of a URL."""
    if url := _URL.match(text):
        return url[1] + url[2]
    path = PureWindowsPath(text)  # knows both kinds of separators
    return path.name if path.drive or path.root or text.startswith(("~", "..")) else text


def _code(text: str) -> str:
    """Returns a text as a Markdown code span, in which Markdown interprets nothing; control characters become
    spaces."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text[:_MOST_TEXT]).split())
    longest = max((len(run) for run in re.findall(r"`+", plain)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {plain} {fence}" if longest else f"{fence}{plain or ' '}{fence}"
