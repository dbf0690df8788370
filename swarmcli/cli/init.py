"""`swarm init`: a recipe with comments after a few questions, and for a closed run its key."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from swarmcli.cli.console import aloud, err, out
from swarmcli.errors import RecipeError, SwarmError, UsageError
from swarmcli.files.durable import write_file
from swarmcli.recipe import load_recipe, parse_recipe
from swarmcli.recipe.advice import Volunteers, advise
from swarmcli.recipe.dataset import DATA_SUFFIXES
from swarmcli.recipe.limit_store import read_limits
from swarmcli.recipe.pretrained import commit_of
from swarmcli.recipe.run_key import RunKey
from swarmcli.recipe.schema import HUB_NAME, RUN_ID
from swarmcli.recipe.templates import AT_HOME, STDLIB, TASK_TEMPLATES, TEMPLATES, TemplateName, compose, fitted

RECIPE = "recipe.yaml"  # in a directory
SUFFIXES = (".yaml", ".yml")
USUAL: TemplateName = "small"
TEXT = "text"  # the answer that asks for a size next
Answer = TypeVar("Answer")


class Data(NamedTuple):
    """As the recipe says it: `path` is relative for texts of this computer, so that the recipe can travel in a link;
    `begins` is then the directory below which it lies here, "" for the recipe's own."""

    path: str
    begins: str = ""
    is_of_files: bool = False
    labels: tuple[str, ...] = ()  # of the classes in it, as far as they were found


class Answers(NamedTuple):
    run_id: str
    data: Data
    template: TemplateName
    invite: bool
    uplink: float | None  # bytes per second of each volunteer, to which the recipe is fitted; None: the template's
    volunteers: int
    base_model: str = ""
    revision: str = ""


LINES = {  # as the question calls them: what each volunteer sends, and in words
    "network": (None, "all in one network, or not known yet: gradients travel as they are"),
    "good": (50e6 / 8, "good lines, 50 Mbit/s up and more"),
    "home": (AT_HOME.uplink, "usual lines of homes, 10 Mbit/s up"),
}
WHERE = {
    "texts": "A directory with texts, of which each volunteer needs a copy",
    "rows": "A file of rows (.jsonl, .csv, .parquet), of which each volunteer needs a copy",
    "images": "A directory of images, with one below it for each class, of which each volunteer needs a copy",
}
LearnsFrom = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|NAME",
        help="What the model learns from: a directory with texts (or what else the task reads), a dataset of the "
        f"Hugging Face Hub (owner/name), or {STDLIB}: the sources of Python's own standard library, and small data "
        f"made of them. Default: {STDLIB}.",
    ),
]
Uplink = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="What a volunteer's line sends, for example 10Mbit/s: this computer trains the model a moment, and the "
        "recipe gets the way to train that such lines allow.",
    ),
]


def init(
    place: Annotated[
        str, typer.Argument(metavar="[DIR|RECIPE]", help="A directory, made if need be, or the recipe file to write.")
    ] = RECIPE,
    template: Annotated[
        TemplateName | None, typer.Option(help=f"What kind of run. Default: {USUAL}.", show_default=False)
    ] = None,
    run_id: Annotated[str | None, typer.Option(help="The name of the run. Default: the directory's or file's.")] = None,
    data: LearnsFrom = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="Train a model of the Hugging Face Hub further, as it is now: its commit is written into the recipe.",
        ),
    ] = None,
    invite: Annotated[
        bool | None,
        typer.Option(
            "--invite/--open",
            help="Closed: only whom you invite takes part, and the run key is made too. Default: open.",
        ),
    ] = None,
    uplink: Uplink = None,
    volunteers: Annotated[
        int | None,
        typer.Option(min=2, help=f"So many computers as fast as this one at a time. Default: {AT_HOME.count}."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: what is not given is as by default.")] = False,
) -> None:
    """Begin a run of your own: write a recipe with comments, and for a closed run its key.

    At a terminal it asks what the run is called, what the model should learn and from which data, how large it is, and
    who takes part.

    Templates that go on with texts: small (any laptop trains it in minutes, to see how everything works), medium (11
    million parameters, for laptops and desktop computers), gpt2 (86 million, for graphics cards), home and slow-links
    (as medium, for lines of 10 Mbit/s up and for slower ones). One for each other task, small, with what to
    change for real size: chat, lora (needs --base-model), sequence-classification, token-classification, seq2seq,
    masked-lm, image-classification.

    Examples:

    swarm init my-run

    swarm init my-run.yaml --template medium --data ./texts --invite

    swarm init my-run --template gpt2 --uplink 20Mbit/s --volunteers 8

    swarm init my-chat --template chat --data ./chats.jsonl --base-model owner/name
    """
    path = Path(place)
    file = path if path.suffix in SUFFIXES and not path.is_dir() else path / RECIPE
    if file.exists():
        raise UsageError(f"{file} is there already; name another directory or file, or remove it")
    asks = not yes and sys.stdin.isatty()
    base = None if base_model is None else _commit_of(base_model)
    rate = None if uplink is None else read_limits({"upload": uplink}, "--uplink").upload
    chosen = _ask(file, run_id, data, template, invite, base, (rate, volunteers), asks)
    key = _write(file, chosen)
    shown = shlex.quote(str(file))
    err.print(f"wrote {file}" + (f" and the run key {key}, which is yours alone" if key else ""), soft_wrap=True)
    if chosen.uplink is not None:
        by_muon = chosen.template in TEMPLATES and not chosen.base_model
        _fit(file, chosen.uplink, chosen.volunteers, by_muon)
    task = TASK_TEMPLATES.get(chosen.template)
    if task and task.labels and chosen.data.path != STDLIB and not chosen.data.labels:
        err.print("Write the names of the classes in your data into it: labels.", soft_wrap=not err.is_terminal)
    if chosen.data.is_of_files:
        err.print(
            "Each volunteer needs a copy of these data; the page that `swarm join` shows says where it belongs.",
            soft_wrap=not err.is_terminal,
        )
    err.print(
        "Look through it, then begin the run with the line below, on a computer that others can dial"
        + ("." if key else "; it prints the link by which they join."),
        soft_wrap=not err.is_terminal,
    )
    out.print(f"swarm monitor {shown}", soft_wrap=True)
    if key:
        err.print(f"and while that runs, make a link for each person: swarm invite {shown}", soft_wrap=True)


def _ask(
    file: Path,
    run_id: str | None,
    data: str | None,
    template: TemplateName | None,
    invite: bool | None,
    base: tuple[str, str] | None,
    links: tuple[float | None, int | None],
    asks: bool,
) -> Answers:
    """Asks what the command line has not answered. `base`: a model of the Hub and its commit. `links`: what a volunteer
    sends, in bytes per second, and how many there are."""
    name = _usual_name(file) if run_id is None else _name(run_id)
    if run_id is None and asks:
        name = _answer("What is the run called?", name, _name)
    chosen: Any = template or USUAL
    if template is None and asks:
        kinds = {TEXT: "continue texts"} | {kind: each.learned for kind, each in TASK_TEMPLATES.items()}
        chosen = _chosen("What should the model learn?", kinds)
    if chosen == "lora" and base is None:
        if not asks:
            raise UsageError("lora trains beside a model that is there; name one of the Hub: --base-model owner/name")
        base = _answer("Beside which model? The owner/name of one of the Hugging Face Hub.", "", _commit_of)
    reads = TASK_TEMPLATES[chosen].reads if chosen in TASK_TEMPLATES else "texts"
    texts = Data(STDLIB) if data is None else _data_for(file, data, chosen)
    if data is None and asks:
        question = (
            f"Where are the data? {WHERE[reads]}; a dataset of the Hugging Face Hub (owner/name); or {STDLIB}: the "
            "sources of Python or small data made here, to try it at once."
        )
        texts = _answer(question, STDLIB, lambda said: _data_for(file, said, chosen))
    if chosen == TEXT:
        sizes = {size: each.about for size, each in TEMPLATES.items()}
        chosen = _chosen("How large is the model?", sizes) if base is None else USUAL
    uplink, volunteers = links
    usual = TEMPLATES[chosen].volunteers if chosen in TEMPLATES else None
    if usual is None and links == (None, None) and asks:
        lines = {name: words for name, (_, words) in LINES.items()}
        uplink = LINES[_chosen("How are the volunteers connected?", lines)][0]
        if uplink is not None:
            volunteers = _answer("How many computers take part at a time?", str(AT_HOME.count), _count)
    if usual is not None and uplink is None and (volunteers or base):  # its own figures are of its own model
        uplink = usual.uplink
    if uplink is None and volunteers is not None:
        raise UsageError("--volunteers says how many links there are; say how fast they are: --uplink 10Mbit/s")
    if invite is None and asks:
        invite = _answer(
            "Who takes part: whoever has the link (open), or only whom you invite (invite)?", "open", _access
        )
    return Answers(name, texts, chosen, bool(invite), uplink, volunteers or AT_HOME.count, *(base or ()))


def _chosen(question: str, choices: Mapping[str, str]) -> str:
    """A key of `choices`, of which the first is usual, by its number or its beginning."""
    names = list(choices)
    listed = "".join(f"\n  {number}  {name}: {choices[name]}" for number, name in enumerate(names, 1))

    def read(text: str) -> str:
        found = [name for n, name in enumerate(names, 1) if text and (name.startswith(text.lower()) or text == str(n))]
        if len(found) == 1 or text in found:
            return text if text in found else found[0]
        raise UsageError(f"{text!r} is none of {', '.join(names)}")

    return _answer(question + listed, names[0], read)


def _answer(question: str, default: str, read: Callable[[str], Answer]) -> Answer:
    """Asks until `read` understands it."""
    while True:
        try:
            return read(_prompt(question, default))
        except UsageError as error:
            with aloud():
                err.print(str(error), soft_wrap=not err.is_terminal)


def _prompt(question: str, default: str) -> str:
    with aloud():
        err.print(question, soft_wrap=not err.is_terminal)
    return str(typer.prompt("", default=default, prompt_suffix="> ", err=True)).strip()


def _usual_name(file: Path) -> str:
    """The directory's name, or the file's where that has one of its own, as far as a run may be called so."""
    found = file.absolute().parent.name if file.name == RECIPE else file.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", found).strip("-._") or "my-run"


def _name(text: str) -> str:
    if not RUN_ID.fullmatch(text):
        raise UsageError(f"{text!r} is no name for a run: it has letters, digits, dots and dashes")
    return text


def _count(text: str) -> int:
    if not (text.isdecimal() and len(text) < 10 and int(text) > 1):
        raise UsageError(f"{text!r} is no number of computers, of two or more")
    return int(text)


def _access(text: str) -> bool:
    """Whether the run is closed. A word that is neither is asked for again: a run that should be closed is not opened
    by a guess."""
    word = text.lower()
    if word and any(known.startswith(word) for known in ("invited", "closed")):
        return True
    if word and "open".startswith(word):
        return False
    raise UsageError(f"{text!r} is neither open nor invite")


def _data_for(file: Path, data: str, template: str) -> Data:
    if data == STDLIB:
        return Data(data)
    path, task = Path(data).expanduser(), TASK_TEMPLATES.get(template)
    reads = task.reads if task else "texts"
    if not path.exists():
        if re.fullmatch(r"[\w.-]+/[\w.-]+", data) and not data.startswith("."):
            return Data(data)  # a dataset of the Hub
        thing = WHERE[reads].partition(", of which")[0].removeprefix("A ")
        raise UsageError(f"{data} is no {thing} on this computer, nor the name of a dataset (owner/name)")
    if reads == "rows" and path.suffix not in DATA_SUFFIXES:
        raise UsageError(f"{data} is no file of rows, as {template} reads them; name a {', '.join(DATA_SUFFIXES)}")
    if reads == "images" and not any(each.is_dir() for each in path.glob("*")):
        raise UsageError(f"{data} has no directory for each class below it; put the images there so")
    if reads == "texts" and not _holds_text(path):
        raise UsageError(f"{data} holds no text; put text files there, or name another directory")
    labels = _labels_in(path, task.labels) if task and task.labels else ()
    absolute, base = path.resolve(), file.absolute().parent.resolve()
    if absolute.is_relative_to(base):
        return Data(f"./{absolute.relative_to(base).as_posix()}", "", True, labels)
    return Data(f"./{absolute.name}", absolute.parent.as_posix(), True, labels)


def _labels_in(path: Path, column: str) -> tuple[str, ...]:
    """The names of the classes in directories of images or in JSON lines; (): they are not told there."""
    if path.is_dir():
        return tuple(sorted(each.name for each in path.iterdir() if each.is_dir() and not each.name.startswith(".")))
    found: set[str] = set()
    with suppress(ValueError, TypeError, AttributeError, OSError), path.open(encoding="utf-8") as lines:
        for line in lines:
            value = json.loads(line).get(column)
            found.update([value] if isinstance(value, str) else value)
    return tuple(sorted(found)) if all(isinstance(each, str) for each in found) and len(found) > 1 else ()


def _commit_of(model: str) -> tuple[str, str]:
    if not HUB_NAME.fullmatch(model):
        raise UsageError(f"--base-model {model!r} is no model of the Hugging Face Hub: those are called owner/name")
    return model, commit_of(model)


def _holds_text(path: Path) -> bool:
    """Whether a file, or one below a directory, can be learned from: hidden files and those with zero bytes are not."""
    below = path.glob("**/*") if path.is_dir() else [path]
    return any(
        _is_text(file)
        for file in below
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )


def _is_text(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            begins = stream.read(4096)
    except OSError:
        return False
    return bool(begins.strip()) and b"\0" not in begins


def _write(file: Path, chosen: Answers) -> Path | None:
    """Writes the recipe; of a closed run the key first, whose path it gives."""
    texts: dict[str, Any] = {"data": chosen.data.path, "data_dir": chosen.data.begins, "labels": chosen.data.labels}
    texts |= {"base_model": chosen.base_model, "revision": chosen.revision, "fit": chosen.uplink is None}
    parse_recipe(compose(file.name, chosen.run_id, template=chosen.template, **texts))  # before anything is written
    key: Path | None = None
    public = ""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if chosen.invite:
            key = file.with_name(f"{chosen.run_id}.run-key")
            public = RunKey.create(key).public.text
        texts |= {"public": public, "key": key.name if key else ""}
        text = compose(str(file), chosen.run_id, template=chosen.template, **texts)
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
            os.fsync(stream.fileno())
        if chosen.data.path == STDLIB and (task := TASK_TEMPLATES.get(chosen.template)) and task.toy:
            _make_data(file.parent / "data", task.toy)
    except OSError as error:
        raise RecipeError(f"{file} cannot be written: {error.strerror}") from error
    load_recipe(file)
    return key


def _fit(file: Path, uplink: float, count: int, by_muon: bool) -> None:
    """Has the recipe train as such links allow, by how fast this computer trains its model. Where that cannot be found
    out the recipe stays as it is, and the reason is told."""
    recipe = load_recipe(file)
    try:
        with err.status("training the model for a moment, to see how fast this computer is …"):
            from swarmcli.training.pace import numbers_and_pace  # with torch, which takes seconds

            numbers, pace = numbers_and_pace(recipe)
    except SwarmError as error:
        err.print(f"not fitted to the volunteers' links: {error}", soft_wrap=not err.is_terminal)
        return
    step = recipe.micro_batch * recipe.accumulation_steps
    advice = advise(numbers, recipe.target_batch_size, step, Volunteers(uplink, count, pace))
    write_file(file, fitted(file.read_text(encoding="utf-8"), advice, by_muon=by_muon).encode())
    load_recipe(file)
    err.print("\n".join(advice.lines), soft_wrap=not err.is_terminal)


def _make_data(directory: Path, name: str) -> None:
    from swarmcli.shipped import make_data

    if (directory / name).exists():
        return  # nothing is written over
    try:
        make_data.main(directory, [name])
    except ImportError as error:
        raise UsageError(f"drawing images needs pillow ({error}); pip install 'swarmcli[datasets]'") from error
