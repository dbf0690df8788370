"""Chooses which piece of a pass over the data a peer reads next, when all peers of a run share the pass.

A pass over a source is a permutation that all draw from the run's seed, in up to 512 pieces. Each peer says which
pieces of its present pass it has done, and which it has in hand. A peer next takes a piece that no other has, and
begins another pass when there is none. What peers say are claims. If a peer claims a piece that it has not read, others
skip it; if it claims every piece, others go from pass to pass and read pieces of each. Nobody stops reading.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import pydantic
from pydantic import ConfigDict, Field

from swarmcli.training.task import Parts

Bits = Annotated[bytes, Field(max_length=64)]  # one bit for each piece, the lowest bit of the first byte first
# sources that are told to others: each takes some hundred bytes of a record. Further ones are not shared
MOST_SOURCES = 16
LATEST = 1 << 30  # the last pass that others' words lead to: numbers go on from there, and have to fit a record


class SourceRead(pydantic.BaseModel):
    """What one peer says about one source."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    number: Annotated[int, Field(ge=0, lt=1 << 32)]  # of the pass
    parts: Annotated[int, Field(ge=1, le=512)]
    done: Bits
    hand: Bits  # begun, and not done
    before: Bits  # begun in the pass before


class PassRecord(pydantic.BaseModel):
    """What one peer says about all sources, by their numbers."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    sources: Annotated[list[SourceRead], Field(max_length=MOST_SOURCES)] = []
    time: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0  # swarm time


@dataclass(frozen=True, slots=True)
class HeardPass:
    """What another peer says about itself."""

    record: PassRecord
    there: bool  # False: the peer is gone, and what it had in hand is free again


@dataclass(slots=True)
class _Own:
    """This peer's place in one source."""

    number: int
    parts: int = 1
    done: set[int] = field(default_factory=set)
    hand: set[int] = field(default_factory=set)
    before: set[int] = field(default_factory=set)

    def left(self) -> set[int]:
        return set(range(self.parts)) - self.done - self.hand

    def begin(self, number: int) -> None:
        self.before = self.done | self.hand if number == self.number + 1 else set()
        self.number, self.done, self.hand = number, set(), set()


class SharedPass:
    """One peer's part of the passes that its run shares. Its stream calls this in one thread, the network in
    another."""

    def __init__(self, seed: str, *, rng: random.Random | None = None) -> None:
        """`seed`: the run's."""
        self.seed = seed
        self._random = rng or random.Random()
        self._lock = threading.Lock()
        self._own: dict[int, _Own] = {}
        self._words: Sequence[HeardPass] = ()

    def hear(self, words: Sequence[HeardPass]) -> None:
        """`words`: what the others say at present."""
        with self._lock:
            self._words = words

    def says(self) -> PassRecord:
        """Returns what this peer says; empty if it has chosen nothing yet."""
        with self._lock:
            numbers = range(min(max(self._own, default=-1) + 1, MOST_SOURCES))
            return PassRecord(sources=[_told(self._own.get(n, _Own(0))) for n in numbers])

    def settle(self, passes: Sequence[int], begun: Sequence[Parts]) -> None:
        """See PartChooser. The last piece of each source is still being read."""
        with self._lock:
            for n, (number, parts) in enumerate(zip(passes, begun, strict=True)):
                own = self._own.setdefault(n, _Own(number))
                if number == own.number:
                    own.done |= set(parts[:-1])
                    own.hand = own.hand - own.done | set(parts[-1:])

    def next_part(self, source: int, parts: int, number: int, begun: Parts) -> tuple[int, int]:
        """See PartChooser."""
        with self._lock:
            own = self._own.setdefault(source, _Own(number))
            own.parts = parts
            own.hand |= set(begun) - own.done  # also those that a stream reads again after a restart
            present, comes = min(self._pass_of_most(source, parts), LATEST), not (begun or own.done)
            # a newcomer goes where most are, and so does a peer that is two passes behind
            if present > own.number + (not comes):
                own.begin(present)
            if not (free := own.left() - self._taken(source, own)):
                own.begin(own.number + 1)
                free = own.left() - self._taken(source, own) or own.left()
            # A peer reads piece after piece: nobody is likely to take the next one before this peer's word of it is
            # there. But if another peer has the last piece too, the two would go on alike, so this one draws.
            alone = begun and begun[-1] not in self._taken(source, own)
            following = (begun[-1] + 1) % parts if alone else -1
            part = following if following in free else self._random.choice(sorted(free))
            own.hand.add(part)
            return own.number, part

    def _pass_of_most(self, source: int, parts: int) -> int:
        """Returns the median of the passes of peers that are there, the lower of two; 0: none is known."""
        numbers = sorted(told.number for told, there in self._told_of(source, parts) if there)
        return numbers[(len(numbers) - 1) // 2] if numbers else 0

    def _taken(self, source: int, own: _Own) -> set[int]:
        """Returns the pieces of this peer's pass that others have."""
        taken = 0
        for told, there in self._told_of(source, own.parts):
            if told.number == own.number:
                taken |= _number(told.done) | (_number(told.hand) if there else 0)
            elif told.number == own.number + 1:
                taken |= _number(told.before)
        return {part for part in range(own.parts) if taken >> part & 1}

    def _told_of(self, source: int, parts: int) -> Iterator[tuple[SourceRead, bool]]:
        """Yields what peers say about a source that they divide into as many pieces: with other numbers of pieces they
        have other data."""
        for word in self._words:
            if source < len(word.record.sources) and (told := word.record.sources[source]).parts == parts:
                yield told, word.there


def _told(own: _Own) -> SourceRead:
    done, hand, before = (_bytes_of(_bits_of(each)) for each in (own.done, own.hand, own.before))
    return SourceRead(number=own.number, parts=own.parts, done=done, hand=hand, before=before)


def _bits_of(parts: set[int]) -> int:
    return sum(1 << part for part in parts)


def _bytes_of(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")
