"""How a command starts without collecting garbage among its imports, and how its process keeps memory.

Nearly all objects that imports make stay for good. Python's collector, which looks for cycles of unreachable objects
after every 700 new ones, took a fifth of the processor time until a trainer's first gradient.

Peers that `swarm` starts divide the cores (`peer/processors.py`), so the threads of their OpenMP teams may spin while
they wait for each other; those of a user's own program may not.

The C library gives freed memory back to the system and asks for it again: for the activations of a small model 40,000
pages a second. The kernel fills each with zeros, which took a tenth of a trainer's time.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import tempfile
from pathlib import Path

USUAL = gc.get_threshold()
# Turns for which threads of GNU's OpenMP spin before they sleep: in a user's own program, and …
FEW_TURNS = "1000"
MANY_TURNS = "30000"  # … in a peer, some 0.4 ms: longer than a step computes between two operations of a team
WHILE_IMPORTING = 100_000  # new objects between two collections: few megabytes, and a tenth of what a trainer imports
KEPT_BYTES = 128 << 20  # free bytes at the end of the heap that stay with the process
HEAP_BYTES = 32 << 20  # up to this size glibc allocates from the heap, above it by mmap; its highest threshold
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


def let_threads_sleep() -> None:
    """Lets threads of an OpenMP team sleep soon when they wait for each other. Works if torch is imported later.

    At the end of every operation OpenMP's threads spin for 4 ms (300,000 turns in GNU's library) or 200 ms (LLVM's and
    Intel's) before they sleep, on cores that another peer, the loop's thread or other programs of the volunteer want:
    on a busy machine a step took five times as long as with 1,000 turns, and an epoch of two plain loops 25 times.
    GNU's library itself takes at most 1,000 when it knows of more threads than cores.
    benchmarks/NOTES.md has the figures.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", FEW_TURNS)
        os.environ.setdefault("KMP_BLOCKTIME", "1")  # ms


def begin() -> None:
    """From now on the collector runs seldom, and freed memory stays with this process."""
    gc.set_threshold(WHILE_IMPORTING)
    if os.environ.get("GOMP_SPINCOUNT") == FEW_TURNS:  # no person has chosen another number
        os.environ["GOMP_SPINCOUNT"] = MANY_TURNS
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Where the C library is glibc, and no person has said otherwise."""
    if platform.libc_ver()[0] == "glibc" and not any(name.startswith("MALLOC_") for name in os.environ):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, HEAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def find_places() -> None:
    """If the user has no home, or the process no directory for temporary files (hardened services), it is set to
    $SWARM_DATA_DIR. Raises OSError."""
    data = os.environ.get("SWARM_DATA_DIR")
    for name, find in (("HOME", Path.home), ("TMPDIR", tempfile.gettempdir)):
        try:
            find()
        except (RuntimeError, OSError):
            if data:  # otherwise whoever needs it tells what to set
                Path(data).mkdir(0o700, parents=True, exist_ok=True)
                os.environ[name] = str(Path(data).absolute())


def over() -> None:
    """The start is over: the collector leaves out all objects that exist now, and looks at new ones as often as
    usual."""
    gc.freeze()
    gc.set_threshold(*USUAL)
