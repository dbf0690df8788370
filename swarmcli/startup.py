"""How a command starts without looking through what it imports.

Nearly all of that stays for good. Python's search for cycles of objects that nobody holds, after every 700 new ones,
took a fifth of the processor's time until a trainer's first gradient.
"""

from __future__ import annotations

import gc

USUAL = gc.get_threshold()
WHILE_IMPORTING = 100_000  # new objects between two searches: few megabytes, and a tenth of what a trainer imports


def begin() -> None:
    """From now on cycles are looked for seldom."""
    gc.set_threshold(WHILE_IMPORTING)


def over() -> None:
    """Whatever is there now stays, and is not looked through again; cycles of what is made from now on are found as
    soon as ever."""
    gc.freeze()
    gc.set_threshold(*USUAL)
