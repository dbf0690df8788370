"""The sources that a recipe names, and the streams of batches that a task reads from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from swarmcli.errors import DataError, RecipeError
from swarmcli.machine.places import data_directory
from swarmcli.recipe import AnyDataset, FilesDataset, Recipe, StdlibDataset
from swarmcli.recipe.dataset import LOCAL_BUILDERS
from swarmcli.training.samples import Example, MixturePosition, SampleMaker, SamplePosition, SampleStream
from swarmcli.training.sources import USUAL, DataOptions, FileSource, HuggingFaceSource, Split, TextSource
from swarmcli.training.task import Batch, PartChooser


def place_of(recipe: Recipe, dataset: AnyDataset) -> tuple[str | int, ...]:
    """Returns where a dataset stands in the recipe: the keys that lead to it."""
    found = next((index for index, item in enumerate(recipe.datasets) if item is dataset), None)
    return ("evaluation", "dataset") if found is None else ("datasets", found)


def open_source(
    recipe: Recipe,
    dataset: AnyDataset,
    split: Split | None = None,
    options: DataOptions = USUAL,
    *,
    rows: bool = False,
) -> TextSource:
    """Opens the dataset that an item of `datasets` names, or with `split` a part of its text files. `rows`: the source
    yields whole rows and not their texts. Raises DataError with the fix when its files are missing."""
    if isinstance(dataset, StdlibDataset):
        return FileSource.stdlib(split)
    if isinstance(dataset, FilesDataset):
        path = recipe.locate(dataset.path, data=True)
        return FileSource.below(path, dataset.glob, split, options)
    local = dataset.path in LOCAL_BUILDERS
    files = [
        str(recipe.locate(file, data=True)) if local and "://" not in file else file for file in dataset.data_files
    ]
    if not local and Path(dataset.path).exists():
        # The library would read that directory in place of the Hub's dataset; and a stranger may have chosen the name.
        raise DataError(
            f"{dataset.path!r} is the name of a dataset on the Hub, and {Path(dataset.path).absolute()} exists on this "
            "computer, which would be read instead; start swarm in another directory"
        )
    return HuggingFaceSource(
        dataset.path,
        name=dataset.name,
        split=dataset.split,
        data_files=files,
        revision=dataset.revision,
        text_column=None if rows or dataset.type == "chat_template" else dataset.field,
        streaming=dataset.streaming,
        held_out=split,
        options=options,
        called=f"{recipe.origin(*place_of(recipe, dataset))}: the dataset {(files or [dataset.path])[0]!r}",
        # A recipe in the directory for recipes that came by links was written by a stranger.
        public_only=recipe.directory.resolve().parent == data_directory().resolve(),
    )


def _open_item(recipe: Recipe, index: int, rows: bool) -> TextSource:
    held_out = recipe.held_out
    try:
        split = Split(held_out, evaluates=False) if held_out else None
        return open_source(recipe, recipe.datasets[index], split, rows=rows)
    except DataError as error:
        raise RecipeError(f"{recipe.origin('datasets', index, 'path')}: datasets.{index}: {error}") from error


def sample_stream(
    recipe: Recipe,
    maker: SampleMaker,
    seed: int,
    position: Mapping[str, Any] | None = None,
    chooser: PartChooser | None = None,
    *,
    rows: bool = False,
) -> SampleStream:
    """Returns one peer's endless stream of micro-batches, the same for the same seed and choices of `chooser`; `rows`:
    the maker reads whole rows.

    Raises DataError, and ValueError for a `position` of other data.
    """
    sources = [_open_item(recipe, index, rows) for index in range(len(recipe.datasets))]
    if maker.by_rows and all(isinstance(source, HuggingFaceSource) for source in sources):
        # rows come in a random order already: a larger block would only delay the first batch
        block = recipe.micro_batch
    else:  # 2^20 tokens, but at least `least_block` samples, and at most as many as the recipe allows
        block = min(recipe.local.shuffle_buffer_size, max(USUAL.least_block, (1 << 20) // max(1, recipe.sequence_len)))
    return SampleStream(
        sources,
        [dataset.weight for dataset in recipe.datasets],
        maker,
        seed=seed,
        batch_size=recipe.micro_batch,
        block=block,
        position=position,
        chooser=chooser,
    )


def evaluation_batches(
    recipe: Recipe, maker_of: Callable[[Sequence[AnyDataset]], SampleMaker], *, rows: bool = False
) -> list[Batch]:
    """Returns the micro-batches of the run's evaluations: the same at all peers, of rows that nobody trains on.

    At most `evaluation.samples` samples, fewer where there are no more. Raises DataError with the fix.
    """
    samples: list[Example] = []
    sources = _evaluated(recipe, rows)
    total = sum(dataset.weight for dataset, _ in sources)
    for dataset, source in sources:
        maker = maker_of([dataset])
        documents = (
            (document, MixturePosition(1, (0,), (document.place,))) for document in source.documents("swarm/evaluation")
        )
        made = maker.samples(documents, SamplePosition(MixturePosition.beginning(1), (), 0))
        wanted = max(1, round(recipe.evaluation.samples * dataset.weight / total))
        samples += [sample for sample, _, _ in islice(made, wanted)]
    if not samples and rows:
        raise DataError("no row to evaluate on teaches anything; check which columns the recipe reads")
    if not samples:
        raise DataError(
            f"what is held out is shorter than one sequence of {recipe.sequence_len} tokens, or teaches nothing; raise "
            "evaluation.held_out, or lower sequence_len"
        )
    size = recipe.micro_batch
    return [maker.collate(samples[first : first + size]) for first in range(0, len(samples), size)]


def _evaluated(recipe: Recipe, rows: bool) -> list[tuple[AnyDataset, TextSource]]:
    named, held_out = recipe.evaluation.dataset, recipe.held_out
    if named is not None:
        try:
            source = open_source(recipe, named, rows=rows)
            _check_disjoint(recipe, source)
        except DataError as error:
            raise DataError(f"{recipe.origin('evaluation', 'dataset')}: evaluation.dataset: {error}") from error
        return [(named, source)]
    split = Split(held_out, evaluates=True)
    return [(dataset, open_source(recipe, dataset, split, rows=rows)) for dataset in recipe.datasets]


def _check_disjoint(recipe: Recipe, source: TextSource) -> None:
    """Raises DataError if `source` has files that are trained on as well. Datasets of the Hub are not compared here:
    `recipe.rules` compares the values that choose their rows."""
    trained = {file.resolve() for each in recipe.datasets for file in open_source(recipe, each).files}
    both = sorted(file for file in source.files if file.resolve() in trained)
    if both:
        raise DataError(
            f"{len(both)} of its {len(source.files)} files are trained on too, {both[0]} among them; name others, or "
            "use evaluation.held_out instead"
        )
