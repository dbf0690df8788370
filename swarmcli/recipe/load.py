"""From a file and the command line to a checked recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pydantic

from swarmcli.errors import RecipeError
from swarmcli.recipe.document import MAX_BYTES, parse_document, plain
from swarmcli.recipe.overrides import apply_overrides, rename_old_keys
from swarmcli.recipe.problems import recipe_error
from swarmcli.recipe.schema import Recipe


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
        raise RecipeError(f"{file}: cannot be read ({error.strerror}); give the path of a recipe file") from error
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
