"""`swarm init`: writes a recipe with comments, from a shipped one, and for a closed run its key."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import typer

from swarmcli.cli.console import err, out
from swarmcli.errors import RecipeError, UsageError
from swarmcli.recipe import Recipe, load_recipe, parse_recipe
from swarmcli.recipe.dataset import DATA_SUFFIXES
from swarmcli.recipe.patterns import MODEL_ON_HUB
from swarmcli.recipe.pretrained import commit_of
from swarmcli.recipe.run_key import RunKey
from swarmcli.recipe.schema import RUN_ID
from swarmcli.recipe.task_names import BUILT_IN
from swarmcli.recipe.templates import SHIPPED, STDLIB, TemplateName, compose, small_data_of

RECIPE = "recipe.yaml"  # in a directory
SUFFIXES = (".yaml", ".yml")
LABELLED_BY = {"token_classification": "tags"}  # the column with names of classes, if it is not `label`


class TrainingData(NamedTuple):
    """The data that `--data` names. `item`: of `datasets`; None: the shipped one. `begins`: where its relative path
    begins on this computer, "": beside the recipe. `labels`: None: the shipped ones."""

    item: Mapping[str, Any] | None = None
    begins: str = ""
    labels: tuple[str, ...] | None = None


def init(
    place: Annotated[
        str, typer.Argument(metavar="[DIR|RECIPE]", help="A directory, made if need be, or the recipe file to write.")
    ] = RECIPE,
    template: Annotated[
        TemplateName | None, typer.Option(help="What kind of run. Default: small.", show_default=False)
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="The same by the name of a recipe's task: causal_lm, sequence_classification, …")
    ] = None,
    run_id: Annotated[str | None, typer.Option(help="The name of the run. Default: the directory's or file's.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|NAME",
            help="What the model learns from: a directory with texts (or what else the task reads), a dataset of the "
            f"Hugging Face Hub (owner/name), or {STDLIB}: the sources of Python's own standard library, and small data "
            f"made of them. Default: {STDLIB}.",
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="Train a model of the Hugging Face Hub further, as it is now: its commit is written into the recipe.",
        ),
    ] = None,
    invite: Annotated[
        bool,
        typer.Option("--invite/--open", help="A closed run: only those you invite take part; its key is made too."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", hidden=True, help="For scripts: nothing is asked any more.")] = False,
) -> None:
    """Begin a run of your own: write a recipe with comments, and for a closed run its key.

    Templates that go on with texts: small (any laptop trains it in minutes, to see how everything works), medium (11
    million parameters, for laptops and desktop computers), gpt2 (86 million, for graphics cards), home and slow-links
    (as medium, for lines of 10 Mbit/s up and for slower ones). One for each other task, small, with what to
    change for real size: chat, lora (needs --base-model), sequence-classification, token-classification, seq2seq,
    masked-lm, image-classification.

    Then `swarm validate RECIPE --uplink 10Mbit/s --volunteers 8` tells which way to train suits your volunteers.

    Examples:

    swarm init my-run

    swarm init my-run.yaml --template medium --data ./texts --invite

    swarm init my-chat --template chat --data ./chats.jsonl --base-model owner/name
    """
    path = Path(place)
    file = path if path.suffix in SUFFIXES and not path.is_dir() else path / RECIPE
    if file.exists():
        raise UsageError(f"{file} is there already; name another directory or file, or remove it")
    template = _template(template, task)
    name = _usual_name(file) if run_id is None else run_id
    if not RUN_ID.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a run: it has letters, digits, dots and dashes")
    if template == "lora" and base_model is None:
        raise UsageError("lora trains beside a model that is there; name one of the Hub: --base-model owner/name")
    shipped = load_recipe(SHIPPED / f"{template}.yaml")
    chosen = TrainingData() if data in (None, STDLIB) else _data(file, str(data), shipped)
    texts: dict[str, Any] = {"dataset": chosen.item, "data_dir": chosen.begins, "labels": chosen.labels}
    if base_model is not None:
        if not MODEL_ON_HUB.fullmatch(base_model):
            raise UsageError(
                f"--base-model {base_model!r} is no model of the Hugging Face Hub: those are called owner/name"
            )
        texts |= {"base_model": base_model, "revision": commit_of(base_model)}
    parse_recipe(compose(file.name, name, template=template, **texts))  # before anything is written
    key = _write(file, name, template, texts, invite)
    if chosen.item is None and (made := small_data_of(template)):
        _make_data(file.parent / "data", made)
    shown = shlex.quote(str(file))
    err.print(f"wrote {file}" + (f" and the run key {key}, which is yours alone" if key else ""), soft_wrap=True)
    wrap = not err.is_terminal
    if chosen.labels == ():
        err.print("Write the names of the classes in your data into it: labels.", soft_wrap=wrap)
    if chosen.item is not None and Path(str(data)).expanduser().exists():
        err.print(
            "Each volunteer needs a copy of these data, and names the directory that contains it: "
            "--set local.data_dir=DIRECTORY.",
            soft_wrap=wrap,
        )
    err.print(
        "Look through it, then begin the run with the line below, on a computer that others can dial"
        + ("." if key else "; it prints the link by which they join."),
        soft_wrap=wrap,
    )
    out.print(f"swarm monitor {shown}", soft_wrap=True)
    if key:
        err.print(f"and while that runs, make a link for each person: swarm invite {shown}", soft_wrap=True)


def _template(template: TemplateName | None, task: str | None) -> TemplateName:
    if task is None:
        return template or "small"
    of_task: dict[str, list[TemplateName]] = {}  # the first is usual
    for name in get_args(TemplateName):
        of_task.setdefault(load_recipe(SHIPPED / f"{name}.yaml").task, []).append(name)
    if task not in of_task:
        raise UsageError(f"there is no template of task {task!r}; name one of {', '.join(of_task)}")
    if template is not None and template not in of_task[task]:
        raise UsageError(f"the template {template} is of another task than {task}; leave one of the two out")
    return template or of_task[task][0]


def _usual_name(file: Path) -> str:
    """Returns the directory's name, or the file's if the file is not called recipe.yaml, without characters that a
    run's name may not have."""
    found = file.absolute().parent.name if file.name == RECIPE else file.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", found).strip("-._") or "my-run"


def _data(file: Path, data: str, shipped: Recipe) -> TrainingData:
    """Returns the data that `data` names, a dataset of the Hub, or a file or directory of this computer, for the task
    of the shipped recipe."""
    path, images = Path(data).expanduser(), shipped.task == "image_classification"
    labelled = BUILT_IN[shipped.task].labelled
    if not path.exists():
        if data.startswith(".") or not re.fullmatch(r"[\w.-]+/[\w.-]+", data):
            raise UsageError(f"{data} is nothing on this computer, nor the name of a dataset (owner/name)")
        return TrainingData(_item(data, shipped), labels=() if labelled else None)
    absolute, base = path.resolve(), file.absolute().parent.resolve()
    beside = absolute.is_relative_to(base)
    begins = "" if beside else absolute.parent.as_posix()
    named = f"./{absolute.relative_to(base).as_posix() if beside else absolute.name}"
    labels = _labels_in(path, LABELLED_BY.get(shipped.task, "label")) if labelled else None
    if images:
        return TrainingData({"path": "imagefolder", "data_files": [f"{named}/**"], "streaming": False}, begins, labels)
    if shipped.datasets[0].source == "huggingface" and shipped.adapter is None and path.suffix not in DATA_SUFFIXES:
        kinds = ", ".join(DATA_SUFFIXES)
        raise UsageError(f"{data} is no file of rows, as {shipped.run_id} reads them; name a {kinds}")
    return TrainingData(_item(named, shipped), begins, labels)


def _item(path: str, shipped: Recipe) -> dict[str, Any]:
    """Returns an item of `datasets`, read as the shipped recipe reads its own."""
    kind = shipped.datasets[0].type
    return {"path": path} | ({"type": kind} if kind != "text" else {})


def _labels_in(path: Path, column: str) -> tuple[str, ...]:
    """Returns the names of the classes in directories of images or in JSON lines; (): they are not told there."""
    if path.is_dir():
        return tuple(sorted(each.name for each in path.iterdir() if each.is_dir() and not each.name.startswith(".")))
    found: set[str] = set()
    with suppress(ValueError, TypeError, AttributeError, OSError), path.open(encoding="utf-8") as lines:
        for line in lines:
            value = json.loads(line).get(column)
            found.update([value] if isinstance(value, str) else value)
    return tuple(sorted(found)) if all(isinstance(each, str) for each in found) and len(found) > 1 else ()


def _write(file: Path, name: str, template: TemplateName, texts: dict[str, Any], invite: bool) -> Path | None:
    """Writes the recipe, and for a closed run first its key; returns the key's path."""
    key: Path | None = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if invite:
            key = file.with_name(f"{name}.run-key")
            texts |= {"public": RunKey.create(key).public.text, "key": key.name}
        with file.open("x", encoding="utf-8") as stream:
            stream.write(compose(str(file), name, template=template, **texts))
            os.fsync(stream.fileno())
    except OSError as error:
        raise RecipeError(f"{file} cannot be written: {error.strerror}") from error
    load_recipe(file)
    return key


def _make_data(directory: Path, name: str) -> None:
    from swarmcli.shipped import make_data

    if (directory / name).exists():
        return  # nothing is overwritten
    try:
        make_data.main(directory, [name])
    except ImportError as error:
        raise UsageError(f"drawing images needs pillow ({error}); pip install 'swarmcli[datasets]'") from error
    except OSError as error:
        raise RecipeError(f"{directory / name} cannot be written: {error.strerror}") from error
