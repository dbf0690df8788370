"""The limits of one peer, put together from all places where somebody may set them, and the file in which `swarm
limits` keeps them. Only the program writes that file: whole, and it gets its name when the disk has all of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pydantic

from swarmcli.errors import RecipeError
from swarmcli.files.durable import write_file
from swarmcli.recipe.config import UserConfig, config_file, load_config
from swarmcli.recipe.document import RecipeEntry, Word, plain, read_text
from swarmcli.recipe.limits import FORMER, KEYS, Limits, as_text, merged
from swarmcli.recipe.problems import recipe_error
from swarmcli.recipe.schema import Recipe

DEFAULT = "default"  # a change to this value forgets what the volunteer has set for a key
RUNNING = "set while running"
COMMANDED = "the command line"


class LimitStore:
    """Any thread may call it. Each limit is the one set in the strongest place that says something about it:

    set while running, then the command line (`--limit`, `--set local.limits.…`), then the limits that are kept, then
    the recipe file.
    """

    def __init__(self, recipe: Recipe | None = None, config: Path | None = None) -> None:
        """`config`: the user's configuration, beside which limits are kept; None is `config_file()`. Raises RecipeError
        if they cannot be read."""
        self._config = config or config_file()
        self._file = limits_file(self._config)
        self._recipe = recipe
        self._running: dict[str, Any] = {}
        self._lock = threading.Lock()
        # may move a former version's limits into the file, so the stamp is taken after it
        kept = kept_limits(self._config)
        self._stamp = self._look()
        self.notes = tuple(_notes(kept, self._file, load_config(self._config)))  # what the user should know
        self._kept = _known(kept, self._file)
        self._limits, self._sources = self._merge()

    @property
    def limits(self) -> Limits:
        """The limits that hold now."""
        return self._limits

    @property
    def sources(self) -> Mapping[str, str]:
        """By key that somebody has set, where the limit in force was set: a file, or words."""
        return self._sources

    def shown(self) -> dict[str, dict[str, Any]]:
        """Returns for people and JSON every key's `value` in base units, its `text`, and where it comes `from`."""
        limits, sources = self._limits, self._sources
        return {
            key: {"value": value, "text": as_text(key, value), "from": sources.get(key, "")}
            for key, value in limits.model_dump().items()
        }

    def change(self, changes: Mapping[str, Any], *, keep: bool = False) -> Limits:
        """Sets limits from now on, as people write them or in base units; None means no limit, and "default" forgets
        what was set. With `keep` also in the file, for the next start. Returns the limits that hold then.

        Raises RecipeError, and changes nothing, for an unknown key, a value that makes no sense, or a file that cannot
        be written.
        """
        read = read_changes(changes, "the new limits")
        with self._lock:
            if keep:
                self._kept = _known(keep_limits(read, self._config), self._file)
                self._stamp = self._look()
                # Limits that are kept follow the file, unless the command line says something else.
                read = {key: value if key in _of_recipe(self._recipe)[1] else ... for key, value in read.items()}
            self._running = {key: value for key, value in (self._running | read).items() if value is not ...}
            self._limits, self._sources = self._merge()
            return self._limits

    def reload(self) -> bool:
        """Takes over what another process has kept meanwhile. Returns whether the limits changed.

        Raises RecipeError, once for each change of the file, if it cannot be used or is gone; then the limits stay.
        """
        with self._lock:
            if (stamp := self._look()) == self._stamp:
                return False
            self._stamp, before = stamp, self._limits
            self._kept = _known(_read(self._file), self._file)
            self._limits, self._sources = self._merge()
            return self._limits != before

    def _look(self) -> tuple[int, int]:
        with suppress(OSError):
            found = self._file.stat()
            return found.st_mtime_ns, found.st_size
        return -1, -1

    def _merge(self) -> tuple[Limits, dict[str, str]]:
        recipe, commanded = _of_recipe(self._recipe)
        kept = {key: (value, str(self._file)) for key, value in self._kept.items()}
        running = {key: (value, RUNNING) for key, value in self._running.items()}
        found = recipe | kept | commanded | running
        return merged({key: value for key, (value, _) in found.items()}), {key: at for key, (_, at) in found.items()}


Written = dict[str, tuple[Any, str]]  # key → value and where it stands


def _of_recipe(recipe: Recipe | None) -> tuple[Written, Written]:
    """Returns the limits that the recipe sets, and those among them that the command line sets."""
    if recipe is None:
        return {}, {}
    written = {
        key: (value, recipe.origin("local", "limits", key)) for key, value in recipe.local.limits.written.items()
    }
    commanded = {key: (value, COMMANDED) for key, (value, origin) in written.items() if origin.startswith("--")}
    return written, commanded


# The file


def limits_file(config: Path | None = None) -> Path:
    """Returns where the limits of this user are kept: beside the configuration."""
    return (config or config_file()).with_suffix(".limits.json")


def keep_limits(changes: Mapping[str, Any], config: Path | None = None) -> dict[str, str]:
    """Writes limits, in base units, into the user's file; a value of `...` removes the key. Returns what the file says
    then.

    Raises RecipeError if the file cannot be read or written; then it is as it was. If all limits are to be forgotten,
    it is not read.
    """
    config = config or config_file()
    anew = all(changes.get(key) is ... for key in KEYS)
    words = {} if anew else kept_limits(config)
    words |= {key: "" if value is ... else as_text(key, value) for key, value in changes.items()}
    words = {key: text for key, text in words.items() if text}
    try:
        _write(limits_file(config), words)
    except OSError as error:
        raise RecipeError(
            f"{limits_file(config)}: cannot be written ({error.strerror}), so nothing has changed; set them for now "
            "only, or make room there"
        ) from error
    return words


def kept_limits(config: Path) -> dict[str, str]:
    """Returns the limits that the user keeps, in words, also those of former versions. Limits that a former version
    kept in the configuration are moved into the file at the first look. Raises RecipeError for a file that cannot be
    used."""
    file = limits_file(config)
    if file.exists():
        return _read(file)
    section = load_config(config).limits
    if section is None:
        return {}
    former = {}
    if isinstance(section.value, dict):
        former = {key: str(plain(entry, str)) for key, entry in section.value.items() if key in FORMER}
        section = replace(section, value={key: entry for key, entry in section.value.items() if key not in FORMER})
    root = RecipeEntry({"limits": section}, section.origin)
    try:
        found = _Moved.model_validate(plain(root, _Moved)).limits.written
    except pydantic.ValidationError as error:
        raise recipe_error(error, root, _Moved) from None
    words = former | {key: as_text(key, value) for key, value in found.items()}
    with suppress(OSError):  # if the file cannot be written, they are read from the configuration again
        _write(file, words)
    return words


class _Moved(pydantic.BaseModel):
    limits: Limits = Limits()


def _read(file: Path) -> dict[str, str]:
    try:
        found = json.loads(read_text(file, "file of limits"))
        if isinstance(found, dict) and all(isinstance(value, str) for value in found.values()):
            return found
    except (OSError, ValueError, RecursionError):
        pass
    raise RecipeError(
        f"{file}: cannot be read as what `swarm limits set` writes; restore it, or begin anew without limits by "
        "`swarm limits reset`"
    )


def _write(file: Path, words: Mapping[str, str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, (json.dumps(words, ensure_ascii=False, indent=1) + "\n").encode())


def _known(words: Mapping[str, str], file: Path) -> dict[str, Any]:
    """Returns the limits in base units. Keys that this version does not know stop no peer: `notes` tells of them at its
    start."""
    return read_limits({key: text for key, text in words.items() if key in KEYS}, str(file)).written


def _notes(words: Mapping[str, str], file: Path, config: UserConfig) -> list[str]:
    told = [
        f"{file}: there is no limit {key} in this version; {FORMER.get(key, 'another one may have it')}; "
        f"`swarm limits reset {key}` ends this line"
        for key in words
        if key not in KEYS
    ]
    if config.limits is not None and file.exists():
        told.append(
            f"{config.limits.origin}: limits count here no longer: those that stood here are in {file}, where "
            "`swarm limits set` changes them; remove this section"
        )
    return told


# in the words of people


def commanded(words: Sequence[str], option: str = "--limit") -> dict[str, Any]:
    """Returns limits as the command line has them, `key=value`, as they were written. Raises RecipeError for what makes
    no sense."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise RecipeError(f"{option} {word}: expected key=value; write for example {option} upload=2MB/s")
        found[key.strip()] = value.strip()
        read_changes({key.strip(): value.strip()}, f"{option} {word}")
    return found


def read_changes(changes: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Returns changes in base units, `...` where a key is to be forgotten. Raises RecipeError."""
    forgotten = {key: ... for key, value in changes.items() if value == DEFAULT}
    for key in changes:
        if key in FORMER and key not in forgotten:
            raise RecipeError(f"{origin}: there is no limit {key} any more; {FORMER[key]}")
        if key not in KEYS and key not in FORMER:
            near = get_close_matches(str(key), KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(KEYS)}"
            raise RecipeError(f"{origin}: there is no limit {str(key)[:60]!r}; {hint}")
    return read_limits({key: changes[key] for key in changes.keys() - forgotten.keys()}, origin).written | forgotten


def read_limits(values: Mapping[str, Any], origin: str) -> Limits:
    """Reads limits as people write them. Raises RecipeError with a line `origin: key: problem; fix` for each wrong
    one."""
    try:
        return Limits.model_validate(dict(values))
    except pydantic.ValidationError as error:
        root = RecipeEntry({key: RecipeEntry(Word(str(value)[:100]), origin) for key, value in values.items()}, origin)
        raise recipe_error(error, root, Limits) from None
