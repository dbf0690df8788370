"""The user's own configuration: one file for all runs of this computer, and what is kept in it for a person.

    name: Ada            # how my peers are called
    team: Lovelace's
    limits:
      upload: 2 MB/s
      hours: 22:00-08:00

Its values are stronger than those of a recipe file, and weaker than the command line. Changing one leaves the rest of
the file, comments too, as it was.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import platformdirs
import pydantic
import yaml
from pydantic import PrivateAttr

from swarmcli.errors import RecipeError
from swarmcli.files.durable import write_file
from swarmcli.recipe.document import RecipeEntry, Word, parse_document, plain, read_text
from swarmcli.recipe.limits import Limits, as_text
from swarmcli.recipe.problems import recipe_error
from swarmcli.recipe.section import Section, own

VARIABLE = "SWARM_CONFIG"


def config_file() -> Path:
    """$SWARM_CONFIG, or config.yaml where the platform has the configuration of programs."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().resolve()
    return platformdirs.user_config_path("swarm", appauthor=False) / "config.yaml"


class UserConfig(Section):
    """The values in the file; none without a file."""

    name: str | None = own(None, "how your peers are called; null: the short peer id", max_length=64)
    team: str | None = own(None, "the team that your contributions count for", max_length=64)
    limits: Limits = Limits()

    _root: RecipeEntry = PrivateAttr(default_factory=lambda: RecipeEntry({}, ""))

    def origin(self, *path: str) -> str:
        """`file:line` of a value that is written."""
        here = self._root
        for key in path:
            here = here.child(key) or here
        return here.origin


def load_config(file: Path | None = None, *, may_be_empty: bool = False) -> UserConfig:
    """Reads the user's file (None: `config_file()`); one that is not there says nothing, and neither does an empty one
    if it `may_be_empty`: what stood in it may be lost, and limits with it.

    Raises RecipeError with file, line, key and fix for everything that is wrong in it.
    """
    file = file or config_file()
    try:
        text = read_text(file, "configuration").strip("\0")  # a power cut leaves zeros
    except FileNotFoundError:
        return UserConfig()
    except OSError as error:
        raise RecipeError(
            f"{file}: cannot be read ({error.strerror}); mend it, or name another by {VARIABLE}"
        ) from error
    if not may_be_empty and not text.strip():
        raise RecipeError(
            f"{file}: is empty, as after a full disk or a power cut; `swarm limits set` with any limit writes it anew, "
            "with those that running peers hold; `swarm limits reset` goes on without any, as does removing the file"
        )
    return parse_config(text, str(file))


def is_empty(file: Path) -> bool:
    """Whether it is there and says nothing, as after a full disk."""
    try:
        return not file.read_bytes().strip(b"\0 \t\r\n")
    except OSError:
        return False


def overrides_of(config: UserConfig) -> list[str]:
    """Writes the file's word about a peer as `--set` would, to stand before that of the command line. Limits are not
    among them; they may change while a peer runs (`LimitStore`)."""
    said = {"name": config.name, "team": config.team}
    return [f"local.{key}={json.dumps(text, ensure_ascii=False)}" for key, text in said.items() if text is not None]


def parse_config(text: str, name: str) -> UserConfig:
    """The same for a text."""
    if all(not line.strip() or line.lstrip().startswith("#") for line in text.splitlines()):
        return UserConfig()
    root = parse_document(text, name, what="configuration")
    try:
        config = UserConfig.model_validate(plain(root, UserConfig))
    except pydantic.ValidationError as error:
        raise recipe_error(error, root, UserConfig) from None
    config._root = root
    return config


def read_limits(values: Mapping[str, Any], origin: str) -> Limits:
    """Limits from anywhere but a file. Raises RecipeError with a line `origin: key: problem; fix` for each wrong
    one."""
    try:
        return Limits.model_validate(dict(values))
    except pydantic.ValidationError as error:
        root = RecipeEntry({key: RecipeEntry(Word(str(value)[:100]), origin) for key, value in values.items()}, origin)
        raise recipe_error(error, root, Limits) from None


def keep_limits(changes: Mapping[str, Any], file: Path | None = None) -> None:
    """Writes limits, in base units, into the user's file; a value of `...` is removed from it.

    Raises RecipeError if the file cannot be read or written; then it is as it was.
    """
    file = file or config_file()
    before = load_config(file, may_be_empty=True)
    text = file.read_text(encoding="utf-8").strip("\0") if file.exists() else ""
    with suppress(yaml.YAMLError):  # of what the lines before have become: told below
        for key, value in changes.items():
            text = _with_limit(text, key, None if value is ... else as_text(key, value))
    limits = {key: value for key, value in (before.limits.written | dict(changes)).items() if value is not ...}
    if _told(text, str(file)) != _in_words(before.model_copy(update={"limits": Limits.model_validate(limits)})):
        wanted = "; ".join(f"{key}: {'' if value is ... else as_text(key, value)}" for key, value in changes.items())
        raise RecipeError(f"{file}: it is written in a way that only you can change; set there, below limits, {wanted}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, (text if text.strip() else "limits:\n").encode())  # an empty one says that they are lost
    except OSError as error:
        raise RecipeError(
            f"{file}: cannot be written ({error.strerror}), so nothing has changed; set them for now only, or make "
            "room there"
        ) from error


def _told(text: str, name: str) -> dict[str, Any]:
    try:
        return _in_words(parse_config(text, name))
    except RecipeError:  # braces over several lines, anchors: nobody's words are lost by a guess
        return {}


def _in_words(config: UserConfig) -> dict[str, Any]:
    """All that a file says. In words, since those are what is written: six digits of a number."""
    limits = {key: as_text(key, value) for key, value in config.limits.written.items()}
    return {**config.model_dump(exclude={"limits"}), "limits": limits}


def _with_limit(text: str, key: str, value: str | None) -> str:
    """The text with one line of `limits:` changed, added, or without a value removed."""
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    pairs = {name.value: (name, node) for name, node in root.value} if isinstance(root, yaml.MappingNode) else {}
    if "limits" not in pairs:
        return "".join(lines) + (f"limits:\n  {key}: {_word(value)}\n" if value is not None else "")
    name, section = pairs["limits"]
    inner = {name.value: (name, node) for name, node in section.value} if isinstance(section, yaml.MappingNode) else {}
    if key in inner:
        begin, end = inner[key][0].start_mark, inner[key][1].end_mark
        if value is None:
            del lines[begin.line : end.line + 1]
        else:
            rest = lines[end.line][end.column :] if end.line < len(lines) else "\n"
            lines[begin.line : end.line + 1] = [f"{lines[begin.line][: begin.column]}{key}: {_word(value)}{rest}"]
    elif value is not None:
        column = next(iter(inner.values()))[0].start_mark.column if inner else name.start_mark.column + 2
        lines.insert(name.start_mark.line + 1, f"{' ' * column}{key}: {_word(value)}\n")
    return "".join(lines)


def _word(value: str | None) -> str:
    """As YAML: in quotes where it would not be read as it stands."""
    text = value or ""
    return text if re.fullmatch(r"[A-Za-z0-9]([\w ,%/°+.-]|:(?! ))*", text) else json.dumps(text, ensure_ascii=False)
