"""The names of tasks, known before any of them is imported."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points

GROUP = "swarmcli.tasks"  # the entry points of packages that bring tasks
BUILT_IN = {"causal_lm": "causal_lm:CausalLanguageModelling"}  # name: module below swarmcli.training.tasks, class


@cache
def installed_tasks() -> dict[str, EntryPoint]:
    """The tasks that other installed packages bring, by name. Nothing of them is imported."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def check_task(name: str) -> str:
    """The name of a task that is installed here. Raises ValueError with the fix."""
    known = [*BUILT_IN, *installed_tasks()]
    if name in known:
        return name
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
    raise ValueError(f"{name!r:.80} is no task that is installed here; {hint}; if a package brings it, install that")
