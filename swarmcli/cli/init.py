"""`swarm init`: a recipe with comments after four questions, and for a closed run its key."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import typer

from swarmcli.cli.console import aloud, err, out
from swarmcli.errors import RecipeError, UsageError
from swarmcli.recipe import load_recipe, parse_recipe
from swarmcli.recipe.pretrained import commit_of
from swarmcli.recipe.run_key import RunKey
from swarmcli.recipe.schema import HUB_NAME, RUN_ID
from swarmcli.recipe.templates import STDLIB, TEMPLATES, TemplateName, compose

RECIPE = "recipe.yaml"  # in a directory
SUFFIXES = (".yaml", ".yml")
USUAL: TemplateName = "small"
LOOK_BYTES = 4096  # of a file, whether it is text
Answer = TypeVar("Answer")


class Data(NamedTuple):
    """As the recipe says it: `path` is relative for texts of this computer, so that the recipe can travel in a link;
    `begins` is then the directory below which it lies here, "" for the recipe's own."""

    path: str
    begins: str = ""
    is_of_files: bool = False


class Answers(NamedTuple):
    run_id: str
    data: Data
    template: TemplateName
    invite: bool
    base_model: str = ""
    revision: str = ""


def init(
    place: Annotated[
        str, typer.Argument(metavar="[DIR|RECIPE]", help="A directory, made if need be, or the recipe file to write.")
    ] = RECIPE,
    template: Annotated[
        TemplateName | None, typer.Option(help=f"What kind of run. Default: {USUAL}.", show_default=False)
    ] = None,
    run_id: Annotated[str | None, typer.Option(help="The name of the run. Default: the directory's or file's.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|NAME",
            help="What the model learns from: a directory with texts, a dataset of the Hugging Face Hub "
            f"(owner/name), or {STDLIB}: the sources of Python's own standard library. Default: {STDLIB}.",
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
        bool | None,
        typer.Option(
            "--invite/--open",
            help="Closed: only whom you invite takes part, and the run key is made too. Default: open.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: what is not given is as by default.")] = False,
) -> None:
    """Begin a run of your own: write a recipe with comments, and for a closed run its key.

    At a terminal it asks four questions: what the run is called, what the model learns from, how large it is, and who
    takes part.

    Templates: small (any laptop trains it in minutes, to see how everything works), medium (11 million parameters, for
    laptops and desktop computers), gpt2 (86 million, for graphics cards), slow-links (as medium, with one exchange of
    models per epoch instead of gradients).

    Examples:

    swarm init my-run

    swarm init my-run.yaml --template medium --data ./texts --invite
    """
    path = Path(place)
    file = path if path.suffix in SUFFIXES and not path.is_dir() else path / RECIPE
    if file.exists():
        raise UsageError(f"{file} is there already; name another directory or file, or remove it")
    asks = not yes and sys.stdin.isatty()
    commit = "" if base_model is None else _commit_of(base_model)
    if base_model is not None:
        template = template or USUAL  # how large the model is has been said
    chosen = _ask(file, run_id, data, template, invite, asks)._replace(base_model=base_model or "", revision=commit)
    key = _write(file, chosen)
    shown = shlex.quote(str(file))
    err.print(f"wrote {file}" + (f" and the run key {key}, which is yours alone" if key else ""), soft_wrap=True)
    if chosen.data.is_of_files:
        err.print(
            "Each volunteer needs a copy of these texts; the page that `swarm join` shows says where it belongs.",
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
    file: Path, run_id: str | None, data: str | None, template: TemplateName | None, invite: bool | None, asks: bool
) -> Answers:
    """Four questions, those aside that the command line has answered; what it says is checked before any is asked."""
    name = _usual_name(file) if run_id is None else _name(run_id)
    texts = Data(STDLIB) if data is None else _data_for(file, data)
    if run_id is None and asks:
        name = _answer("What is the run called?", name, _name)
    if data is None and asks:
        question = (
            "What shall it learn from? A directory with texts, of which each volunteer needs a copy; a dataset of the "
            f"Hugging Face Hub (owner/name); or {STDLIB}: the sources of Python, to try it at once."
        )
        texts = _answer(question, STDLIB, lambda said: _data_for(file, said))
    if template is None and asks:
        kinds = "".join(f"\n  {name}: {each.about}" for name, each in TEMPLATES.items())
        template = _answer(f"How large is the model?{kinds}", USUAL, _template)
    if invite is None and asks:
        invite = _answer(
            "Who takes part: whoever has the link (open), or only whom you invite (invite)?", "open", _access
        )
    return Answers(name, texts, template or USUAL, bool(invite))


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


def _template(text: str) -> TemplateName:
    found = [name for name in TEMPLATES if text and name.startswith(text.lower())]
    if len(found) == 1:
        return found[0]
    raise UsageError(f"{text!r} is none of {', '.join(TEMPLATES)}")


def _access(text: str) -> bool:
    """Whether the run is closed. A word that is neither is asked for again: a run that should be closed is not opened
    by a guess."""
    word = text.lower()
    if word and any(known.startswith(word) for known in ("invited", "closed")):
        return True
    if word and "open".startswith(word):
        return False
    raise UsageError(f"{text!r} is neither open nor invite")


def _data_for(file: Path, data: str) -> Data:
    if data == STDLIB:
        return Data(data)
    path = Path(data).expanduser()
    if not path.exists():
        if re.fullmatch(r"[\w.-]+/[\w.-]+", data) and not data.startswith("."):
            return Data(data)  # a dataset of the Hub
        raise UsageError(f"{data} is no directory with texts on this computer, nor the name of a dataset (owner/name)")
    if not _holds_text(path):
        raise UsageError(f"{data} holds no text; put text files there, or name another directory")
    absolute, base = path.resolve(), file.absolute().parent.resolve()
    if absolute.is_relative_to(base):
        return Data(f"./{absolute.relative_to(base).as_posix()}", is_of_files=True)
    return Data(f"./{absolute.name}", absolute.parent.as_posix(), is_of_files=True)


def _commit_of(model: str) -> str:
    if not HUB_NAME.fullmatch(model):
        raise UsageError(f"--base-model {model!r} is no model of the Hugging Face Hub: those are called owner/name")
    return commit_of(model)


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
            begins = stream.read(LOOK_BYTES)
    except OSError:
        return False
    return bool(begins.strip()) and b"\0" not in begins


def _write(file: Path, chosen: Answers) -> Path | None:
    """Writes the recipe; of a closed run the key first, whose path it gives."""
    texts = {"data": chosen.data.path, "data_dir": chosen.data.begins}
    texts |= {"base_model": chosen.base_model, "revision": chosen.revision}
    parse_recipe(compose(file.name, chosen.run_id, template=chosen.template, **texts))  # before anything is written
    key: Path | None = None
    public = ""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if chosen.invite:
            key = file.with_name(f"{chosen.run_id}.run-key")
            public = RunKey.create(key).public.text
        keys = {"public": public, "key": key.name if key else ""}
        text = compose(str(file), chosen.run_id, template=chosen.template, **texts, **keys)
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
            os.fsync(stream.fileno())
    except OSError as error:
        raise RecipeError(f"{file} cannot be written: {error.strerror}") from error
    load_recipe(file)
    return key
