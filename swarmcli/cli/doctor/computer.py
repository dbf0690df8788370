"""Checks of this computer: Python and what swarm stands on, torch and its device, disks, clock, configuration."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from swarmcli import __version__
from swarmcli.cli.doctor.finding import Context, Finding, of_error
from swarmcli.errors import RecipeError, SwarmError

if TYPE_CHECKING:
    import torch

DISTRIBUTION = "swarmcli"
LEAST_FREE, LITTLE_FREE = 500 << 20, 5 << 30  # bytes: too little for a journal and a checkpoint, little for a model
FIRST_YEAR, LAST_YEAR = 2026, 2100  # before this version was written no clock was right
SIZE = 512  # rows and columns of the matrices
# Of the product, in the norm of Frobenius: TF32 keeps 10 bits of a factor, bfloat16 keeps 8. A broken device is off by
# as much as the product itself.
MOST_OFF = {"float32": 2e-3, "bfloat16": 2e-2}


def check_python(context: Context) -> Iterator[Finding]:
    """Python, and whether the packages that swarm needs are there, in versions that it can use."""
    from packaging.requirements import Requirement

    wrong, fitting = [], []
    for text in metadata.requires(DISTRIBUTION) or ():
        needed = Requirement(text)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{needed.name} is missing")
        else:
            if needed.specifier.contains(found, prereleases=True):
                continue
            wrong.append(f"{needed.name} is {found}, and swarm needs {needed.specifier}")
        fitting.append(f'"{needed.name}{needed.specifier}"')
    if wrong:
        yield Finding("Python", "FAIL", ", ".join(wrong), f"{sys.executable} -m pip install {' '.join(fitting)}")
    else:
        yield Finding("Python", "OK", f"{sys.version.split()[0]} with all packages, swarm {__version__}")


def check_torch(context: Context) -> Iterator[Finding]:
    """The device that a peer would compute on, by a product of matrices in each precision that it would use."""
    try:
        import torch
    except Exception as error:  # a broken installation raises what it likes
        yield of_error("torch", error, fix="install torch again, see https://pytorch.org/get-started")
        return
    from swarmcli.training.device import best_compute, choose_compute

    try:
        compute = choose_compute(context.recipe) if context.recipe is not None else best_compute()
    except RecipeError as error:
        yield of_error("device", error)
        return
    yield Finding("torch", "OK", f"{torch.__version__}, computes on {compute}")
    for dtype in dict.fromkeys((torch.float32, compute.autocast_dtype or torch.float32)):
        yield _product_finding(compute.device, dtype)


def _product_finding(device: torch.device, dtype: torch.dtype) -> Finding:
    name = str(dtype).removeprefix("torch.")
    check, fix = (
        f"{device} in {name}",
        (
            "do not train on it: update the driver and torch, look after heat and overclocking; until then "
            "--set local.device=cpu"
        ),
    )
    try:
        off = relative_error(device, dtype)
    except RuntimeError as error:  # of torch: a driver that does not fit, a device that others hold, no memory
        return of_error(check, error, fix=fix)
    if not off <= MOST_OFF[name]:  # NaN is wrong too
        return Finding(check, "FAIL", f"a product of matrices comes out wrong (by {off:.1g} of itself)", fix)
    return Finding(check, "OK", "a product of matrices comes out right")


def relative_error(device: torch.device, dtype: torch.dtype) -> float:
    """Of a product of two matrices on the device, against the processor in float64."""
    import torch

    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64) for _ in range(2))
    right = one @ other
    found = product(one.to(device, dtype), other.to(device, dtype)).to("cpu", torch.float64)
    return float((found - right).norm() / right.norm())


def product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one @ other


def check_disk(context: Context) -> Iterator[Finding]:
    """Room where homes, downloads and temporary files lie, and whether this user may write there."""
    seen: set[int] = set()
    for what, wanted in _places(context):
        place = _existing(wanted)
        if not os.access(place, os.W_OK | os.X_OK):
            yield Finding(
                "disk", "FAIL", f"{what} would lie in {place}, where you may not write", _elsewhere(what, place)
            )
            continue
        disk = place.stat().st_dev
        if disk in seen:
            continue
        seen.add(disk)
        free = shutil.disk_usage(place).free
        text = f"{free / 1e9:.1f} GB free at {place} ({what})"
        if free < LITTLE_FREE:
            fix = f"make room there, or {_elsewhere(what, place)}"
            yield Finding("disk", "FAIL" if free < LEAST_FREE else "WARN", text, fix)
        else:
            yield Finding("disk", "OK", text)


def _places(context: Context) -> list[tuple[str, Path]]:
    import tempfile

    from swarmcli.machine.places import data_directory

    cache = Path(os.environ.get("HF_HOME", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")))
    own = [("output_dir of the recipe", Path(context.recipe.output_dir))] if context.recipe is not None else []
    running = [("directory of a running peer", Path(peer.home)) for peer in context.registry.peers()]
    return [
        *own,
        *running,
        ("runs that you joined", data_directory()),
        ("downloads", cache.expanduser()),
        ("temporary files", Path(tempfile.gettempdir())),
    ]


def _existing(path: Path) -> Path:
    """The directory itself, or the nearest one above it that is there."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())


def _elsewhere(what: str, place: Path) -> str:
    variables = {
        "output_dir of the recipe": "set output_dir to another directory",
        "directory of a running peer": "start it with another --home",
        "runs that you joined": "set SWARM_DATA_DIR to another directory",
        "downloads": "set HF_HOME to another directory",
    }
    return variables.get(what, "set TMPDIR to another directory")


def check_clock(context: Context) -> Iterator[Finding]:
    """Whether it can be right at all, and whether this computer knows its time zone. `check_contacts` compares it."""
    now = time.time()
    year = time.gmtime(now).tm_year
    if not FIRST_YEAR <= year <= LAST_YEAR:
        yield Finding(
            "clock",
            "FAIL",
            f"this computer's clock says that it is the year {year}",
            "set the clock, and switch on setting it by the network; invitations and hours depend on it",
        )
        return
    there = datetime.fromtimestamp(now).astimezone()
    if there.tzinfo is None or not there.tzname():
        yield Finding("clock", "WARN", "the time zone is not known", "set it, or time_zone in your limits")
        return
    yield Finding("clock", "OK", f"{there:%Y-%m-%d %H:%M}, time zone {there.tzname()} (UTC{there:%z})")


def check_configuration(context: Context) -> Iterator[Finding]:
    """The user's own file."""
    from swarmcli.recipe.config import config_file, load_config

    file = config_file()
    try:
        config = load_config(file)
    except RecipeError as error:
        for line in str(error).splitlines():
            yield of_error("configuration", RecipeError(line))
        return
    if not file.exists():
        yield Finding("configuration", "OK", f"there is none yet; your name and limits would stand in {file}")
        return
    limits = len(config.limits.written)
    yield Finding("configuration", "OK", f"{file}, {limits} {'limit' if limits == 1 else 'limits'}")


def check_limits(context: Context) -> Iterator[Finding]:
    """Whether they would keep a peer paused at this moment, and which of them this computer cannot keep."""
    from swarmcli.machine.sensors import sensors_for
    from swarmcli.peer.governor import Governor
    from swarmcli.recipe.limit_store import LimitStore

    try:
        limits = LimitStore(context.recipe).limits
    except SwarmError:
        yield Finding("limits", "SKIP", "your configuration cannot be read")
        return
    if not limits.written:
        yield Finding("limits", "OK", "none: a peer takes what it can use")
        return
    governor = Governor()
    readings = sensors_for([Path.cwd()], context.registry.living).read(limits)
    reasons = governor.decide(limits, readings)
    for reason in reasons.values():
        yield Finding(
            "limits",
            "WARN",
            f"a peer would pause now: {reason.text}",
            "that is as you set it; `swarm limits show` and `swarm limits set` change it",
        )
    for text in governor.unknown:
        yield Finding("limits", "WARN", text, "use another limit in its place, for example hours or processor")
    if not reasons and not governor.unknown:
        yield Finding("limits", "OK", f"{', '.join(limits.written)}: a peer would run now")
