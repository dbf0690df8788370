"""The limits of one peer, from all places in which somebody may write them, and changes while it runs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from swarmcli.errors import RecipeError
from swarmcli.recipe.config import config_file, is_empty, keep_limits, load_config, read_limits
from swarmcli.recipe.limits import KEYS, Limits, as_text, merged
from swarmcli.recipe.schema import Recipe

DEFAULT = "default"  # a change to this value takes back what the volunteer has said about a key
RUNNING = "set while running"
COMMANDED = "the command line"
GONE = -1, -1  # stands for the time and size of a file that is not there


class LimitStore:
    """For any thread. Each limit is the one that is written in the strongest place that says something about it:

    set while running, then the command line (`--limit`, `--set local.limits.…`), the user's file, the recipe file.
    """

    def __init__(self, recipe: Recipe | None = None, file: Path | None = None) -> None:
        """`file`: the user's; None is `config_file()`. Raises RecipeError if it cannot be used."""
        self._file = file or config_file()
        self._recipe = recipe
        self._running: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._gone = self._stamp == GONE  # at the last look
        self._config = load_config(self._file)
        self._limits, self._sources = self._merge()

    @property
    def limits(self) -> Limits:
        """Those that hold now."""
        return self._limits

    @property
    def sources(self) -> Mapping[str, str]:
        """For each key that somebody has written: where the one that holds stands, `file:line` or in words."""
        return self._sources

    def shown(self) -> dict[str, dict[str, Any]]:
        """For people and JSON: of every key its `value` in base units, its `text`, and where it comes `from`."""
        limits, sources = self._limits, self._sources
        return {
            key: {"value": value, "text": as_text(key, value), "from": sources.get(key, "")}
            for key, value in limits.model_dump().items()
        }

    def change(self, changes: Mapping[str, Any], *, keep: bool = False) -> Limits:
        """Sets limits from now on, as people write them or in base units; None means no limit, and "default" forgets
        what was set. With `keep` also in the user's file, for the next start. Returns those that hold then.

        Raises RecipeError, and nothing has changed, for an unknown key, a value that makes no sense, or a file that
        cannot be written.
        """
        read = read_changes(changes, "the new limits")
        with self._lock:
            if keep:
                # An empty file was not taken over (see `reload`): what stood in it is written again.
                lost = self._config.limits.written if is_empty(self._file) else {}
                keep_limits({**lost, **read}, self._file)
                self._config, self._stamp = load_config(self._file), self._look()
                # Limits that are kept hold by the file, and follow it, unless the command line says something else.
                read = {key: value if key in _of_recipe(self._recipe)[1] else ... for key, value in read.items()}
            self._running = {key: value for key, value in (self._running | read).items() if value is not ...}
            self._limits, self._sources = self._merge()
            return self._limits

    def reload(self) -> bool:
        """Takes over what was changed in the user's file meanwhile; whether there was anything. That it is gone counts
        from the second look on: editors move a file away before they write the new one.

        Raises RecipeError, once for each change of the file, for one that cannot be used; then the limits stay. So does
        an empty one where there were limits: a full disk, or an editor that has yet to write, leaves it so.
        """
        with self._lock:
            stamp = self._look()
            was_gone, self._gone = self._gone, stamp == GONE
            if stamp == self._stamp or (self._gone and not was_gone):
                return False
            self._stamp = stamp
            self._config = load_config(self._file, may_be_empty=not self._config.limits.written)
            before = self._limits
            self._limits, self._sources = self._merge()
            return self._limits != before

    def _look(self) -> tuple[int, int]:
        try:
            found = self._file.stat()
        except OSError:
            return GONE
        return found.st_mtime_ns, found.st_size

    def _merge(self) -> tuple[Limits, dict[str, str]]:
        recipe, commanded = _of_recipe(self._recipe)
        filed = {key: (value, self._config.origin("limits", key)) for key, value in self._config.limits.written.items()}
        running = {key: (value, RUNNING) for key, value in self._running.items()}
        found = recipe | filed | commanded | running
        return merged({key: value for key, (value, _) in found.items()}), {key: at for key, (_, at) in found.items()}


Written = dict[str, tuple[Any, str]]  # key → value and where it stands


def _of_recipe(recipe: Recipe | None) -> tuple[Written, Written]:
    """The limits in the recipe's file, and those of the command line."""
    if recipe is None:
        return {}, {}
    written = {
        key: (value, recipe.origin("local", "limits", key)) for key, value in recipe.local.limits.written.items()
    }
    commanded = {key: (value, COMMANDED) for key, (value, origin) in written.items() if origin.startswith("--")}
    return written, commanded


def commanded(words: Sequence[str], option: str = "--limit") -> dict[str, Any]:
    """Limits as the command line says them, `key=value`, as they were written. Raises RecipeError for what makes no
    sense."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise RecipeError(f"{option} {word}: expected key=value; write for example {option} upload=2MB/s")
        found[key.strip()] = value.strip()
        read_changes({key.strip(): value.strip()}, f"{option} {word}")
    return found


def read_changes(changes: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Changes in base units, `...` where a key is to be forgotten. Raises RecipeError."""
    for key in changes:
        if key not in KEYS:
            near = get_close_matches(str(key), KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(KEYS)}"
            raise RecipeError(f"{origin}: there is no limit {str(key)[:60]!r}; {hint}")
    forgotten = {key: ... for key, value in changes.items() if value == DEFAULT}
    return read_limits({key: changes[key] for key in changes.keys() - forgotten.keys()}, origin).written | forgotten
