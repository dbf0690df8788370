"""Makes a checked recipe of a file and the command line. What the command line changes is merged into the file's
entries before anything is checked: words as somebody typed them (`--set a.b=value`), which are read like the file, and
options of the program with their values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pydantic

from swarmcli.errors import RecipeError
from swarmcli.recipe.document import RecipeEntry, Word, entries_of, parse_document, parse_value, plain, read_text
from swarmcli.recipe.problems import as_written, recipe_error
from swarmcli.recipe.schema import Recipe, Setting

MOST_OF_OPTION = 1000  # values of one option


def _merge(root: RecipeEntry, setting: Setting) -> None:
    """Writes `a.b=value` into the tree; missing sections on the way are made.

    List items are named by position: `datasets.0.glob=*.md`; the position after the last one appends.
    """
    if isinstance(setting, str):
        origin, (path, equals, text) = f"--set {setting}", setting.partition("=")
        if not equals or not all(path.strip().split(".")):
            raise RecipeError(f"{origin}: expected key=value; write for example --set optimizer.learning_rate=1e-3")
        entry = parse_value(text, origin)
    else:
        path, value = str(setting[0]), setting[1]
        origin = f"--set {path}={as_written(value)}"
        entry = entries_of(value, origin, MOST_OF_OPTION)
    here, keys = root, path.strip().split(".")
    for depth, key in enumerate(keys[:-1]):
        at = ".".join(keys[:depth])
        below = here.child(_position(here, key, origin, at))
        # YAML reads an empty section as a word; it becomes a section now.
        if below is None or (isinstance(below.value, Word) and below.value.resolve() is None):
            below = RecipeEntry({}, origin)
            _put(here, key, below, at)
        here = below
    _put(here, keys[-1], entry, ".".join(keys[:-1]))


def _put(here: RecipeEntry, key: str, entry: RecipeEntry, at: str) -> None:
    position = _position(here, key, entry.origin, at)
    if isinstance(here.value, dict):
        here.value[key] = entry
    elif isinstance(here.value, list) and isinstance(position, int):
        here.value[position : position + 1] = [entry]


def _position(here: RecipeEntry, key: str, origin: str, at: str) -> str | int:
    if isinstance(here.value, dict):
        return key
    if not isinstance(here.value, list):
        raise RecipeError(f"{origin}: {at} holds a single value at {here.origin}, so nothing can stand below it")
    length = len(here.value)
    if not (key.isascii() and key.isdigit() and int(key) <= length):
        raise RecipeError(f"{origin}: {at} is a list, so {key!r} must be a position from 0 to {length}")
    return int(key)


def load_recipe(path: Path | str, overrides: Sequence[Setting] = ()) -> Recipe:
    """Reads a recipe file and merges `overrides`.

    Raises RecipeError with a line `file:line: problem; fix` for everything that is wrong. Runs no code of the recipe.
    """
    file = Path(path)
    try:
        text = read_text(file)
    except OSError as error:
        raise RecipeError(_unreadable(str(path), error)) from error
    return parse_recipe(text, overrides, name=str(file), directory=file.resolve().parent)


def _unreadable(named: str, error: OSError) -> str:
    """Guesses what a person who named this may have meant. `named` may have gone through a Path, which drops
    slashes."""
    if re.match("https?:/", named, re.IGNORECASE):
        return (
            "that is the address of a web page; open it in a browser and copy the link there: it begins with swarm://"
        )
    if ":/" in named:
        return "that looks like a part of a link; copy it again, all of it from swarm:// on"
    if named in ("", "."):
        return "nothing is named; give a link (swarm://…) or the path of a recipe file"
    return f"{named}: cannot be read ({error.strerror}); give a link (swarm://…) or the path of a recipe file"


def parse_recipe(
    text: str,
    overrides: Sequence[Setting] = (),
    *,
    name: str = "<recipe>",
    directory: Path | str | None = None,
) -> Recipe:
    """The same for a text; relative paths begin in `directory` (default: where the process was started)."""
    root, home = parse_document(text, name), Path(directory or Path.cwd())
    for setting in overrides:
        _merge(root, setting)
    return recipe_of(root, text, overrides, name=name, directory=home)


def recipe_of(root: RecipeEntry, text: str, overrides: Sequence[Setting] = (), *, name: str, directory: Path) -> Recipe:
    """Makes the recipe of entries, which were read from `text`."""
    try:
        recipe = Recipe.model_validate(plain(root, Recipe), context={"directory": directory})
    except pydantic.ValidationError as error:
        raise recipe_error(error, root, Recipe) from None
    recipe._text, recipe._root = text, root
    recipe._directory = directory
    recipe._file, recipe._overrides = name, tuple(overrides)
    return recipe
