"""From a file and the command line to a checked recipe. What the command line changes (`--set a.b=value`) is typed and
checked like the file itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pydantic

from swarmcli.errors import RecipeError
from swarmcli.recipe.document import MAX_BYTES, Entry, parse_document, parse_value, plain
from swarmcli.recipe.problems import recipe_error
from swarmcli.recipe.schema import Recipe

RENAMED = {"lr_scheduler.warmup_steps": "warmup_epochs", "lr_scheduler.total_steps": "total_epochs"}
logger = logging.getLogger(__name__)


def rename_old_keys(root: Entry) -> None:
    """Accepts keys by the names that they had before, with a note. One that is written by both names stays unknown."""
    for old, new in RENAMED.items():
        section, _, key = old.partition(".")
        below = root.child(section)
        if below is not None and isinstance(below.value, dict) and key in below.value and new not in below.value:
            below.value[new] = below.value.pop(key)
            logger.warning("%s: %s is called %s now", below.value[new].origin, old, new)


def apply_overrides(root: Entry, overrides: Sequence[str]) -> None:
    """Writes each `a.b=value` into the tree, in order; missing sections on the way are made.

    List items are named by position: `datasets.0.glob=*.md`; the position behind the last one appends.
    """
    for override in overrides:
        _apply(root, override)
        rename_old_keys(root)


def _apply(root: Entry, override: str) -> None:
    origin = f"--set {override}"
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if new := RENAMED.get(path.strip()):
        logger.warning("%s: %s is called %s now", origin, path.strip(), new)
        keys[-1] = new
    if not equals or not all(keys):
        raise RecipeError(f"{origin}: expected key=value; write for example --set optimizer.learning_rate=1e-3")
    here = root
    for depth, key in enumerate(keys[:-1]):
        here = _descend(here, key, origin, ".".join(keys[:depth]))
    _put(here, keys[-1], parse_value(text, origin), ".".join(keys[:-1]))


def _descend(here: Entry, key: str, origin: str, at: str) -> Entry:
    below = here.child(_position(here, key, origin, at))
    # A section that is written with nothing in it is a word to YAML, and becomes a section now.
    if below is None or _is_blank(below):
        below = Entry({}, origin)
        _put(here, key, below, at)
    return below


def _put(here: Entry, key: str, entry: Entry, at: str) -> None:
    position = _position(here, key, entry.origin, at)
    if isinstance(here.value, dict):
        here.value[key] = entry
    elif isinstance(here.value, list) and isinstance(position, int):
        here.value[position : position + 1] = [entry]


def _position(here: Entry, key: str, origin: str, at: str) -> str | int:
    if isinstance(here.value, dict):
        return key
    if not isinstance(here.value, list):
        raise RecipeError(f"{origin}: {at} holds a single value at {here.origin}, so nothing can stand below it")
    length = len(here.value)
    if not (key.isascii() and key.isdigit() and int(key) <= length):
        raise RecipeError(f"{origin}: {at} is a list, so {key!r} must be a position from 0 to {length}")
    return int(key)


def _is_blank(entry: Entry) -> bool:
    return not isinstance(entry.value, dict | list) and entry.value.resolve() is None


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file and applies `a.b=value` overrides.

    Raises RecipeError with a line `file:line: problem; fix` for everything that is wrong. Runs no code of the recipe.
    """
    file = Path(path)
    try:
        if file.stat().st_size > MAX_BYTES:
            raise RecipeError(f"{file}:1: larger than {MAX_BYTES >> 20} MiB, so this is no recipe; name a YAML file")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"{path}: cannot be read ({error.strerror}); give a link (swarm://…) or the path of a recipe file"
        ) from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file}:1: no UTF-8 text; save the recipe as UTF-8") from error
    return parse_recipe(text, overrides, name=str(file), directory=file.resolve().parent)


def parse_recipe(
    text: str, overrides: Sequence[str] = (), *, name: str = "<recipe>", directory: Path | str | None = None
) -> Recipe:
    """The same for a text; relative paths begin in `directory` (default: where the process was started)."""
    root = parse_document(text, name)
    rename_old_keys(root)
    apply_overrides(root, overrides)
    home = Path(directory or Path.cwd())
    try:
        recipe = Recipe.model_validate(plain(root, Recipe), context={"directory": home})
    except pydantic.ValidationError as error:
        raise recipe_error(error, root, Recipe) from None
    recipe._text, recipe._root = text, root
    recipe._directory = home
    recipe._file, recipe._overrides = name, tuple(overrides)
    return recipe
