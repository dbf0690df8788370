"""Peers that lie, in ways that have names: for tests that say what each lie may achieve at most.

A lie is a function that installs itself on one real peer: the peer goes on as an honest one does in everything else,
which is what makes a lie hard to tell. Each file here has the lies of one layer; `LIES` has all of them, by name.
"""

from tests.adversary.lies.base import LIES, Layer, Liar, Lie, all_lies, draw, lie

__all__ = ["LIES", "Layer", "Liar", "Lie", "all_lies", "draw", "lie"]

all_lies()  # each file enters its own when it is imported
