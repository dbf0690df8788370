"""Checks of this computer: Python and what swarm stands on, torch and its device, disks."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from swarmcli.cli.doctor.finding import Context, Finding, Outcome
from swarmcli.version import build
from swarmcli.words import format_size

if TYPE_CHECKING:
    import torch

LEAST_FREE, LITTLE_FREE = 500 << 20, 5 << 30  # bytes: too little for a journal and a checkpoint, little for a model
SIZE = 512  # rows and columns of the matrices
# The error allowed, in the norm of Frobenius: TF32 keeps 10 bits of a factor, bfloat16 keeps 8. A broken device is off
# by as much as the product itself.
MOST_OFF = {"float32": 2e-3, "bfloat16": 2e-2}
DO_NOT_TRAIN = "do not train on it: update driver and torch, and keep it cool; until then --set local.device=cpu"


def check_python(context: Context) -> Iterator[Finding]:
    """Python, and whether the packages that swarm needs are there, in versions that it can use."""
    from packaging.requirements import Requirement

    wrong, fitting = [], []
    for needed in map(Requirement, metadata.requires("swarmcli") or ()):
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(needed.name)
            if needed.specifier.contains(found, prereleases=True):
                continue
            wrong.append(f"{needed.name} is {found}, and swarm needs {needed.specifier}")
        except metadata.PackageNotFoundError:
            wrong.append(f"{needed.name} is missing")
        fitting.append(f'"{needed.name}{needed.specifier}"')
    if wrong:
        yield Finding("Python", "FAIL", ", ".join(wrong), f"{sys.executable} -m pip install {' '.join(fitting)}")
    else:
        yield Finding("Python", "OK", f"{sys.version.split()[0]} with all packages, swarm {build()}")


def check_torch(context: Context) -> Iterator[Finding]:
    """The device that a peer would compute on, by a product of matrices in each precision that it would use."""
    try:
        import torch
    except Exception as error:  # a broken installation raises what it likes
        fix = "install torch again, see https://pytorch.org/get-started"
        yield Finding("torch", "FAIL", f"{type(error).__name__}: {error}", fix)
        return
    from swarmcli.training.device import best_compute, choose_compute

    compute = choose_compute(context.recipe) if context.recipe is not None else best_compute()
    yield Finding("torch", "OK", f"{torch.__version__}, computes on {compute}")
    for dtype in dict.fromkeys((torch.float32, compute.autocast_dtype or torch.float32)):
        name = str(dtype).removeprefix("torch.")
        check = f"{compute.device} in {name}"
        try:
            off = _relative_error(compute.device, dtype)
            # NaN is wrong too.
            wrong = "" if off <= MOST_OFF[name] else f"a product of matrices comes out wrong (by {off:.1g} of itself)"
        except RuntimeError as error:  # of torch: a driver that does not fit, a device that others hold, no memory
            wrong = " ".join(f"{type(error).__name__}: {error}".split())
        if wrong:
            yield Finding(check, "FAIL", wrong, DO_NOT_TRAIN)
        else:
            yield Finding(check, "OK", "a product of matrices comes out right")


def _relative_error(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the error of a product of two matrices on the device, against the processor in float64."""
    import torch

    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64) for _ in range(2))
    right = one @ other
    found = torch.mm(one.to(device, dtype), other.to(device, dtype)).to("cpu", torch.float64)
    return float((found - right).norm() / right.norm())


def check_disk(context: Context) -> Iterator[Finding]:
    """Room where homes, downloads and temporary files lie, and whether this user may write there."""
    from swarmcli.machine.places import data_directory
    from swarmcli.machine.registry import LocalPeers, temporary_directory

    cache = Path(os.environ.get("HF_HOME", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")))
    places = [
        ("runs that you joined", data_directory(), "set SWARM_DATA_DIR to another directory"),
        ("downloads", cache.expanduser(), "set HF_HOME to another directory"),
        ("temporary files", temporary_directory(), "set TMPDIR to another directory"),
    ]
    for peer in LocalPeers().peers():
        places.insert(0, ("directory of a running peer", Path(peer.home), "start it with another --home"))
    if context.recipe is not None:
        output = Path(context.recipe.output_dir)
        places.insert(0, ("output_dir of the recipe", output, "set output_dir to another directory"))
    seen: set[int] = set()
    for what, wanted, elsewhere in places:
        wanted = wanted.absolute()
        place = next(each for each in (wanted, *wanted.parents) if each.is_dir())
        if not os.access(place, os.W_OK | os.X_OK):
            yield Finding("disk", "FAIL", f"{what} would lie in {place}, where you may not write", elsewhere)
        elif (disk := place.stat().st_dev) not in seen:
            seen.add(disk)
            free = shutil.disk_usage(place).free
            outcome: Outcome = "FAIL" if free < LEAST_FREE else "WARN" if free < LITTLE_FREE else "OK"
            fix = "" if outcome == "OK" else f"make room there, or {elsewhere}"
            yield Finding("disk", outcome, f"{format_size(free)} free at {place} ({what})", fix)
