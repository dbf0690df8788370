"""A model of many rounds: what becomes of samples when rounds commit, die, or stay undecided at some members.

A peer's samples are pending, set aside (outer steps of its last undecided round), counted on the lineage that it
follows, or lost and told. Peers at one position form lists, as far as they reach each other; an undecided peer stays,
and joins the next list there. In the end all that live meet, and follow the lineage that leads.

Gradients are of one position, and a lineage goes on from one of its children: those of an undecided round come back,
and a peer that follows another lineage drops all that it has. What outer steps have moved outlives the position:
without being set aside, two rounds of one lineage could count it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from swarmcli.averaging.round.outcome import Action
from tests.averaging.outcome.model import Round


@dataclass(frozen=True)
class Position:
    """Where rounds have led: the last one and all before it. `samples` are those that it counted."""

    before: Position | None = None
    round_id: int = 0
    samples: frozenset[int] = frozenset()

    @property
    def way(self) -> list[Position]:
        return [] if self.before is None else [*self.before.way, self]

    @property
    def rank(self) -> tuple[int, int, int]:
        """The higher epoch leads, then more samples, then the older round."""
        return len(self.way), sum(len(each.samples) for each in self.way), -self.round_id


@dataclass
class Peer:
    outer: bool = False
    position: Position = field(default_factory=Position)
    computed: set[int] = field(default_factory=set)
    pending: set[int] = field(default_factory=set)
    frozen: set[int] = field(default_factory=set)  # handed in to the round under way
    aside: tuple[int, set[int]] = (-1, set())  # of an undecided round
    lost: set[int] = field(default_factory=set)
    dead: bool = False

    def restore(self) -> None:
        self.pending |= self.frozen
        self.frozen = set()

    def set_aside(self, round_id: int) -> None:
        if not self.outer:
            return self.restore()
        self.lost |= self.aside[1]
        self.aside, self.frozen = (round_id, self.frozen), set()

    def advance(self, position: Position) -> None:
        self.position = position
        self.lost |= self.frozen - position.samples
        self.frozen = set()

    def follow(self, position: Position) -> None:
        """Downloads another lineage: what was handed in and is not in it is lost."""
        if position != self.position:
            counted = {sample for each in position.way for sample in each.samples}
            self.pending = self.pending if self.outer else set()
            self.lost = self.computed - counted - self.pending  # an old round may have counted after all
            self.position, self.frozen, self.aside = position, set(), (-1, set())


class Run:
    """Some peers, round after round."""

    def __init__(self, random_: random.Random) -> None:
        self.random, outer = random_, random_.random() < 0.5
        self.peers = [Peer(outer) for _ in range(random_.randint(2, 6))]
        self.forks = 0
        self._samples = 0
        self._rounds = 0
        self._open: list[tuple[Round, dict[int, Peer], Position, int]] = []  # where somebody has not come to an end yet

    def compute(self) -> None:
        for peer in self.peers:
            for _ in range(self.random.randrange(3)):
                self._samples += 1
                peer.computed.add(self._samples)
                peer.pending.add(self._samples)

    def round(self) -> None:
        """One list among some that are at one position and in no other round."""
        self.compute()
        busy = [peer for _, members, _, _ in self._open for peer in members.values()]
        free = [peer for peer in self.peers if not peer.dead and all(peer is not each for each in busy)]
        if not free:
            return self.go_on()
        position = self.random.choice(free).position
        there = [peer for peer in free if peer.position == position]
        listed = self.random.sample(there, self.random.randint((len(there) + 1) // 2, len(there)))
        self._rounds += 1
        round_ = Round(
            len(listed),
            self.random,
            trust=self.random.choice(["strangers", "members"]),  # type: ignore[arg-type]
            deaths=int(self.random.random() < 0.1),
            lost_parts=self.random.choice([0, 0.3]),
            cuts=self.random.choice([0, 0.3]),
            freezes=0.5,
            nonce=self._rounds.to_bytes(16, "big"),
        )
        for peer in listed:
            peer.frozen, peer.pending = peer.pending, set()
        arrived = frozenset(sample for peer in listed if self.random.random() < 0.9 for sample in peer.frozen)
        self._open.append((round_, dict(enumerate(listed)), Position(position, self._rounds, arrived), self._rounds))
        self.go_on()

    def go_on(self, *, settle: bool = False) -> None:
        for round_, members, child, round_id in self._open:
            for _ in range(self.random.randrange(60 * round_.size)):
                round_.step()
            if settle:
                round_.settle()
            round_.check()
            for index, node in round_.nodes.items():
                if index in members and node.gone:
                    members.pop(index).dead = True
                elif index in members and node.end is not None:
                    self._end(members.pop(index), node.end.move, child, round_id)
        self._open = [each for each in self._open if each[1]]

    def _end(self, peer: Peer, move: Action, child: Position, round_id: int) -> None:
        match move:
            case Action.COMMITTED:
                peer.advance(child)
            case Action.DEAD:
                peer.restore()
            case Action.UNDECIDED:
                peer.set_aside(round_id)

    def check(self) -> None:
        """Each sample is in one place; none is counted twice."""
        for peer in self.peers:
            on_way = [sample for each in peer.position.way for sample in each.samples]
            assert len(on_way) == len(set(on_way)), "counted twice"
            counted = peer.computed & set(on_way)
            for place in (peer.pending, peer.frozen, peer.lost):
                assert not counted & place, "counted, and in another place as well"
            assert counted | peer.pending | peer.frozen | peer.lost | peer.aside[1] == peer.computed, "gone"

    def meet(self, *, settle: bool = False) -> None:
        """All that live, and are in no round, follow the leading one among them."""
        self.go_on(settle=settle)
        in_rounds = [peer for _, members, _, _ in self._open for peer in members.values()]
        living = [peer for peer in self.peers if not peer.dead and all(peer is not each for each in in_rounds)]
        self.forks += len({peer.position for peer in living}) - 1 if living else 0
        leading = max((peer.position for peer in living), key=lambda each: each.rank, default=Position())
        for peer in living:
            peer.follow(leading)
        self.check()
        assert not (settle and self._open), "somebody's round has no end"
        assert len({peer.position for peer in living}) <= 1
