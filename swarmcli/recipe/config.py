"""The user's own configuration: one file for all runs of this computer, which a person writes.

    name: Ada            # how my peers are called
    team: Lovelace's

Its values are stronger than those of a recipe file, and weaker than the command line. Limits are kept beside it
(`recipe/limit_store.py`); former versions had them in this file, below `limits:`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import platformdirs
import pydantic
from pydantic import PrivateAttr

from swarmcli.errors import RecipeError
from swarmcli.recipe.document import RecipeEntry, Word, parse_document, plain, read_text
from swarmcli.recipe.problems import recipe_error
from swarmcli.recipe.section import Section, own

VARIABLE = "SWARM_CONFIG"


def config_file() -> Path:
    """Returns $SWARM_CONFIG, or config.yaml where the platform keeps the configuration of programs."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().resolve()
    return platformdirs.user_config_path("swarm", appauthor=False) / "config.yaml"


class UserConfig(Section):
    """The values in the file; none without a file."""

    name: str | None = own(None, "how your peers are called; null: the short peer id", max_length=64)
    team: str | None = own(None, "the team that your contributions count for", max_length=64)

    _limits: RecipeEntry | None = PrivateAttr(None)

    @property
    def limits(self) -> RecipeEntry | None:
        """The limits that a former version kept below `limits:`; they are read once, see `LimitStore`."""
        return self._limits


def load_config(file: Path | None = None) -> UserConfig:
    """Reads the user's file (None: `config_file()`); without a file nothing is set.

    Raises RecipeError with file, line, key and fix for everything that is wrong in it. An empty file is wrong too: a
    full disk or a power cut leaves one.
    """
    file = file or config_file()
    try:
        return parse_config(read_text(file, "configuration"), str(file))
    except FileNotFoundError:
        return UserConfig()
    except OSError as error:
        raise RecipeError(
            f"{file}: cannot be read ({error.strerror}); mend it, or name another by {VARIABLE}"
        ) from error


def parse_config(text: str, name: str) -> UserConfig:
    """The same for a text."""
    lines = text.strip("\0 \t\r\n").splitlines()  # a power cut leaves zeros
    if not lines:
        raise RecipeError(f"{name}: is empty, as after a full disk or a power cut; restore it, or remove it")
    if all(line.lstrip().startswith("#") or not line.strip() for line in lines):
        return UserConfig()
    root = parse_document(text, name, what="configuration")
    limits = root.value.pop("limits", None) if isinstance(root.value, dict) else None
    try:
        config = UserConfig.model_validate(plain(root, UserConfig))
    except pydantic.ValidationError as error:
        raise recipe_error(error, root, UserConfig) from None
    # YAML reads an empty section as a word.
    config._limits = None if limits is None or (isinstance(limits.value, Word) and not limits.value.text) else limits
    return config


def options_of(config: UserConfig) -> dict[str, Any]:
    """Returns what the file says of a peer, by the keys of a recipe; to be merged before the command line's."""
    said = {"local.name": config.name, "local.team": config.team}
    return {key: text for key, text in said.items() if text is not None}
