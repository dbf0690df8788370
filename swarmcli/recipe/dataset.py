"""The items of `datasets:`: where rows come from (`source`), and how each is read (`type`, `field` …).

Keys are axolotl's where it has one. If a recipe does not name the source, the form of `path` decides, and never what
lies on this computer, or peers of one run would read one recipe in two ways.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from swarmcli.recipe.patterns import ON_HUB
from swarmcli.recipe.section import REQUIRED, Conflict, Section, advised, selectors_of, shared

# Formats of the library `datasets`; further ones read files that can run code.
FORMATS = ("json", "parquet", "csv", "text", "imagefolder")
LOCAL_BUILDERS = (*FORMATS, "arrow")  # builders of the library that read files
SOURCES = ("stdlib", "files", "huggingface")
DATA_SUFFIXES = dict.fromkeys((".json", ".jsonl", ".ndjson"), "json")
DATA_SUFFIXES |= {".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
ALL_FILES = "**/*"  # of a directory
_ENDING = re.compile(r"\.(gz|bz2|xz)$")  # of a compressed file


CHATML = "chatml"  # the one template that has a name


def format_of(name: str) -> str | None:
    """Returns the format in which the library reads a file of this name, by its ending; None: it is a text."""
    bare = _ENDING.sub("", name.lower())
    return next((kind for ending, kind in DATA_SUFFIXES.items() if bare.endswith(ending)), None)


def _template(text: str) -> str:
    if text != CHATML and "{" not in text:
        raise ValueError(
            f"{text!r:.80} is no template; write chatml, a Jinja template, or leave it out to take the tokenizer's own"
        )
    return text


ChatTemplate: TypeAlias = Annotated[str, Field(max_length=1 << 16), AfterValidator(_template)]


TypeOfTexts: TypeAlias = Literal["text", "completion"]
_TYPE_OF_TEXTS = shared("text", "as of every item, but a text has no conversations")
_CHAT, _ROWS = {"type": ["chat_template"]}, {"type": ["text", "completion"]}


class DatasetSettings(Section):
    """Every item has these."""

    type: Literal["text", "completion", "chat_template"] = shared("text", "what a row is")
    weight: float = shared(1.0, "how often rows come from here, relative to other datasets", gt=0)


class FilesDataset(DatasetSettings):
    """Text from a file, or from all files below a directory."""

    source: Literal["files"] = shared("files", "text files of this machine")
    type: TypeOfTexts = _TYPE_OF_TEXTS
    path: str = shared(REQUIRED, "a file or a directory", min_length=1)
    glob: str = shared(ALL_FILES, "which files of a directory", min_length=1)


class StdlibDataset(DatasetSettings):
    """The sources of Python's own standard library: real text that is on every machine."""

    source: Literal["stdlib"] = shared(REQUIRED, "the sources of Python's standard library")
    type: TypeOfTexts = _TYPE_OF_TEXTS


class HuggingFaceDataset(DatasetSettings):
    """A source that `datasets.load_dataset` reads: a dataset of the Hub, or local json, parquet, csv or text files."""

    source: Literal["huggingface"] = shared("huggingface", "a dataset for the library `datasets`")
    path: str = shared(
        REQUIRED, "name on the Hub, or format of data_files: json, parquet, csv, text, imagefolder", min_length=1
    )
    name: str | None = shared(None, "configuration")
    split: str = shared("train", "which split", min_length=1)
    data_files: tuple[str, ...] = shared((), "its files")
    revision: str | None = shared(None, "commit or tag")
    field: str = shared("text", "column with the text", of=_ROWS, min_length=1)
    columns: Mapping[str, str] = shared({}, "columns with what else the task reads: {label: topic}", max_length=16)
    streaming: bool = advised(True, "false: download first")
    field_messages: str = shared("messages", "column with the conversation", of=_CHAT, min_length=1)
    message_property_mappings: Mapping[str, str] = shared(
        {"role": "role", "content": "content"}, "names of message properties in the data", of=_CHAT
    )
    roles_to_train: tuple[str, ...] = shared(("assistant",), "whose turns are learned", of=_CHAT, min_length=1)
    train_on_eos: Literal["turn", "all", "last"] = shared(
        "turn", "learned end marks: of each learned turn, all, or the last", of=_CHAT
    )
    chat_template: ChatTemplate | None = shared(None, "of this dataset alone", of=_CHAT)


# These say how conversations are read.
CHAT_KEYS = frozenset(name for name, info in HuggingFaceDataset.model_fields.items() if selectors_of(info) == _CHAT)
AnyDataset: TypeAlias = FilesDataset | StdlibDataset | HuggingFaceDataset


def with_source(value: Any) -> Any:
    """Returns an item as it is read: with its source, and a data file as format and name. Raises Conflict for keys as
    the first versions had them."""
    if not isinstance(value, Mapping):
        return value
    item = dict(value)
    if item.get("type") in SOURCES and "source" not in item:
        raise Conflict(("type", f"type says what a row is; write `source: {item['type']}`"))
    path = item.get("path")
    if "source" in item or not isinstance(path, str):
        return item
    suffix = format_of(path)
    if suffix is not None and "data_files" not in item:
        return {**item, "source": "huggingface", "path": suffix, "data_files": [path]}
    on_hub = ON_HUB.fullmatch(path) or (path in LOCAL_BUILDERS and "data_files" in item)
    return {**item, "source": "huggingface" if on_hub else "files"}


def _source_of(value: Any) -> Any:
    return value.get("source") if isinstance(value, Mapping) else getattr(value, "source", None)


Dataset = Annotated[
    Annotated[FilesDataset, Tag("files")]
    | Annotated[StdlibDataset, Tag("stdlib")]
    | Annotated[HuggingFaceDataset, Tag("huggingface")],
    Discriminator(_source_of),
    BeforeValidator(with_source),
]
