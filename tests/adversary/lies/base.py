"""What a lie is, and the register of all of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from swarmcli.averaging.find.messages import Candidate, search_id

if TYPE_CHECKING:
    from swarmcli.averaging.core import AveragerCore
    from swarmcli.dht import DHTNode
    from swarmcli.network import Endpoint
    from swarmcli.optim.core import OptimizerCore

Layer: TypeAlias = Literal["parts", "votes", "audits", "gradients", "lineages"]


@dataclass
class Liar:
    """One real peer, of which a lie may change whatever there is. What is None the peer does not have."""

    random: random.Random
    endpoint: Endpoint
    node: DHTNode | None = None
    averager: AveragerCore | None = None
    optimizer: OptimizerCore | None = None
    told: list[str] = field(default_factory=list)  # what it has said so far, for a test that has to see it happen


@dataclass(frozen=True, slots=True)
class Lie:
    """One way to lie.

    at_most   what an honest peer may suffer by it, in words: the test of this name holds it to that
    tell      installs it on a peer; it lies from then on
    """

    name: str
    layer: Layer
    at_most: str
    tell: Callable[[Liar], None]


LIES: dict[str, Lie] = {}


def lie(name: str, layer: Layer, *, at_most: str) -> Callable[[Callable[[Liar], None]], Callable[[Liar], None]]:
    """Enters a function into the register."""
    assert name not in LIES, name

    def enter(tell: Callable[[Liar], None]) -> Callable[[Liar], None]:
        LIES[name] = Lie(name, layer, at_most, tell)
        return tell

    return enter


def on_each_exchange(liar: Liar, alter: Callable[[Any], None]) -> None:
    """`alter` gets each exchange of this averager as it begins."""
    assert liar.averager is not None
    service = liar.averager._service
    host = service.host

    def altered(exchange: Any) -> None:
        alter(exchange)
        host(exchange)

    service.host = altered  # type: ignore[method-assign]


def draw(seed: int, count: int, layers: Collection[Layer] = ()) -> list[Lie]:
    """So many lies, drawn by a seed, of these layers; of all if none is named. One may come twice: liars agree."""
    known = sorted(LIES.values(), key=lambda each: each.name)
    found = [each for each in known if not layers or each.layer in layers]
    return random.Random(seed).choices(found, k=count)


def hurry_to_the_front(liar: Liar) -> None:
    """It says in each search that it has looked since the beginning of time."""
    assert liar.averager is not None
    finder, searches = liar.averager.finder, itertools.count(1)
    describe = finder._me

    def oldest(*, looking: bool) -> Candidate:
        if looking:
            liar.told.append("a search")
            finder._last_search = search_id(next(searches) / 1e6, liar.random.randbytes(8))
        return describe(looking=looking)

    finder._me = oldest  # type: ignore[method-assign]
