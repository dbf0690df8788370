"""Peers that lie, in ways that have names: for tests that say what each lie may achieve at most.

A lie is a function that installs itself on one real peer: the peer goes on as an honest one does in everything else,
which is what makes a lie hard to tell. Each file here has the lies of one layer; `LIES` has all of them, by name.
"""

from tests.adversary.lies import audits, gradients, lineages, parts, stalling, votes  # noqa: F401  # enter their own
from tests.adversary.lies.base import LIES, Layer, Liar, Lie, draw, lie

__all__ = ["LIES", "Layer", "Liar", "Lie", "draw", "lie"]
