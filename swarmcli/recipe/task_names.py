"""The names of tasks, known before any of them is imported."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points

GROUP = "swarmcli.tasks"  # the entry points of packages that bring tasks
CUSTOM = "custom"  # a script hands the task to Collaboration(task=…)


@dataclass(frozen=True, slots=True)
class BuiltInTask:
    """The facts of a task that are known before its code is imported."""

    where: str  # module below swarmcli.training.tasks, and class
    words: str  # what its model does
    pipeline: str  # transformers' and the Hub's name for that
    texts: bool = True  # it reads texts, and so needs a sequence_len
    labelled: bool = False  # it needs labels
    tokens: bool = False  # its losses are means over the tokens that are learned, else over samples


BUILT_IN = {
    "causal_lm": BuiltInTask("causal_lm:CausalLanguageModelling", "predicts text", "text-generation", tokens=True),
    "masked_lm": BuiltInTask("masked_lm:MaskedLanguageModelling", "fills gaps in texts", "fill-mask", tokens=True),
    "sequence_classification": BuiltInTask(
        "sequence_classification:SequenceClassification", "sorts texts", "text-classification", labelled=True
    ),
    "token_classification": BuiltInTask(
        "token_classification:TokenClassification",
        "labels the words of texts",
        "token-classification",
        labelled=True,
        tokens=True,
    ),
    "seq2seq": BuiltInTask(
        "seq2seq:SequenceToSequence", "turns a text into another", "text2text-generation", tokens=True
    ),
    "image_classification": BuiltInTask(
        "image_classification:ImageClassification", "sorts images", "image-classification", texts=False, labelled=True
    ),
}


def mean_in_words(task: str) -> str:
    """Says over what the losses of a task are means, in training and in evaluations."""
    known = BUILT_IN.get(task)
    return "as the task weighs batches" if known is None else "tokens that are learned" if known.tokens else "samples"


@cache
def installed_tasks() -> dict[str, EntryPoint]:
    """Returns the tasks that other installed packages bring, by name. Imports none of them."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def check_task(name: str) -> str:
    """Returns the name, if a task of it is installed here. Raises ValueError with the fix."""
    known = [*BUILT_IN, *installed_tasks(), CUSTOM]
    if name in known:
        return name
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
    raise ValueError(f"{name!r:.80} is no task that is installed here; {hint}; if a package brings it, install that")


def task_in_words(name: str) -> str:
    """Says for people what a task's model does: "predicts text"."""
    if name in BUILT_IN:
        return BUILT_IN[name].words
    entry = installed_tasks().get(name)
    return f"learns the task {name}" + (f" of the package {entry.dist.name}" if entry and entry.dist else "")
