"""The version of this code: by the pyproject.toml beside the package in a checkout or a copy, else as installed."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

from swarmcli.words import printable

MAX_VERSION = 64  # characters of a version that another peer tells
_TOLD = re.compile(r"(\d{1,6}(?:\.\d{1,6}){1,3})(?:\+g([0-9a-f]{4,40}))?")  # only this goes into a command


def _release(root: Path) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] == "swarmcli":
            return str(project["version"])
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("swarmcli")
    return "0"


_ROOT = Path(__file__).parents[1]
__version__ = _release(_ROOT)


@cache
def build(root: Path = _ROOT) -> str:
    """The version, with the commit where git knows it, for example 0.3.0+g1a2b3c4d. Asks git once in a process."""
    release = _release(root)
    if not (root / ".git").exists():  # a repository further up is not this code's
        return release
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    asked = ["git", "-C", str(root), "rev-parse", "--short=8", "HEAD"]
    with suppress(OSError, subprocess.SubprocessError):
        commit = subprocess.run(asked, env=own, capture_output=True, text=True, timeout=5.0, check=True).stdout.strip()
        return f"{release}+g{commit}"[:MAX_VERSION]
    return release


def unlike(theirs: str) -> str:
    """Tells a person whose peer a run has refused what to install; "": the run has this very version. `theirs`: the
    version that a stranger claims, "" if it is too old to say one."""
    mine, known = build(), _TOLD.fullmatch(theirs)
    if theirs == mine:
        return ""
    clone = f", or in a clone `git checkout {known[2]} && pipx install --force .`" if known and known[2] else ""
    get = f"`pipx install --force …`, the line of its page /join{clone}"
    named = f"swarm {printable(theirs, MAX_VERSION)}" if theirs else "a swarm older than 0.2"
    newer = known and _numbers(theirs) >= _numbers(mine)
    fix = get if newer else f"its peers have to be upgraded, or yours goes back: {get}"
    return f"this run uses {named}, you have {mine}: {fix}"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.partition("+")[0].split(".") if number.isdigit()]
