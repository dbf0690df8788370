"""Shows the samples that a recipe makes of its datasets' rows, before anybody trains on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import Literal, TypeAlias

from swarmcli.recipe import AnyDataset
from swarmcli.training.chat import RowEncoder
from swarmcli.training.data import open_source
from swarmcli.training.sources import USUAL, Content, DataOptions
from swarmcli.training.task import Task
from swarmcli.training.tasks.base import ModelTask
from swarmcli.training.tasks.causal_lm import CausalLanguageModelling
from swarmcli.training.tasks.labels import LabelledTask

Use: TypeAlias = Literal["learned", "read", "cut"]  # what a model does with a stretch of tokens


@dataclass(frozen=True)
class LookedAt:
    """What was found in the first rows of a dataset."""

    name: str
    rows: int
    counts: str  # in words: which of them give no sample, and how many are cut
    sample: tuple[tuple[str, Use], ...] = ()  # of the first conversation or text that gives one, with special tokens
    classes: tuple[tuple[str, int, int], ...] = ()  # each with its number, and how often rows have it


def look_at_rows(task: Task, most: int = 100) -> Iterator[LookedAt]:
    """Looks at up to `most` rows, or pieces of text files, of each dataset of a recipe; at ten times as many if rows
    have labels. Raises DataError."""
    if isinstance(task, ModelTask):
        items = (*task.recipe.datasets, task.recipe.evaluation.dataset)
        yield from (_look(task, each, most) for each in items if each is not None)


def _look(task: ModelTask, dataset: AnyDataset, most: int) -> LookedAt:
    encoder, names = task.encoder(dataset), task.names if isinstance(task, LabelledTask) else ()
    # A whole window of a streamed dataset is read before its first row comes, so a small window brings that row sooner.
    # But files are often sorted by class, so labels are counted in windows as large as those that are trained on.
    options = USUAL if names else DataOptions(window_rows=most)
    source = open_source(task.recipe, dataset, None, options, rows=bool(task.columns))
    sample: tuple[tuple[str, Use], ...] = ()
    found = Counter[int]()
    for document in islice(source.documents("swarm/look"), 10 * most if names else most):
        examples = list(encoder(document.content, document.where))
        if names:
            found.update(chain.from_iterable(each["labels"].ravel().tolist() for each in examples))
        elif examples and not sample and isinstance(task, CausalLanguageModelling) and isinstance(encoder, RowEncoder):
            sample = tuple(_stretches(task, encoder, document.content))
    cut = f"{encoder.cut:,} cut at {task.recipe.sequence_len:,} tokens" if encoder.cut else ""
    counts = ", ".join(filter(None, [encoder.skipped().partition(" rows, ")[2], cut]))
    classes = tuple((name, number, found[number]) for number, name in enumerate(names))
    return LookedAt(encoder.name, encoder.rows, counts, sample, classes)


def _stretches(task: CausalLanguageModelling, encoder: RowEncoder, row: Content) -> Iterator[tuple[str, Use]]:
    tokens, learned = encoder.reader(row)
    length = task.recipe.sequence_len
    if encoder.reader.goes_on:
        tokens = tokens[:length]
    tokenizer = task.tokenizer.of_transformers()
    uses: list[Use] = ["cut" if n >= length else "learned" if n and learned[n] else "read" for n in range(len(tokens))]
    for use, numbers in groupby(range(len(tokens)), key=uses.__getitem__):
        stretch = tokens[list(numbers)].tolist()
        yield tokenizer.decode(stretch, skip_special_tokens=False, clean_up_tokenization_spaces=False), use
