"""Which piece of a pass over the data a peer reads next, when all peers of a run share the pass.

A pass over a source is a permutation that all draw from the run's seed, in up to 512 pieces. Each peer says which of
its present pass it has done, and which it has in hand. It takes next one that nobody has, and begins another pass when
there is none. Words are claims: whoever claims what it has not read has others skip that, and whoever claims everything
has them read pieces of one pass after the other. Nobody stops reading.
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

Bits = Annotated[bytes, Field(max_length=64)]  # a piece each, the lowest bit of the first byte first
MOST_SOURCES = 16  # that are told to others: a record is some hundred bytes for each. Others are not shared
LATEST = 1 << 30  # pass that others' words lead to: numbers go on from there, and have to fit a record


class SourceRead(pydantic.BaseModel):
    """One peer's word about one source."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    number: Annotated[int, Field(ge=0, lt=1 << 32)]  # of the pass
    parts: Annotated[int, Field(ge=1, le=512)]
    done: Bits
    hand: Bits  # begun, and not done
    before: Bits  # begun in the pass before


class PassRecord(pydantic.BaseModel):
    """One peer's word about all sources, by their numbers."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    sources: Annotated[list[SourceRead], Field(max_length=MOST_SOURCES)] = []
    time: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0  # swarm time


@dataclass(frozen=True, slots=True)
class HeardPass:
    """Another peer's word about itself."""

    record: PassRecord
    there: bool  # what a peer has in hand that is gone is free again


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
    """One peer's part of the passes that its run shares. Its stream asks in one thread, the network tells in
    another."""

    def __init__(self, seed: str, *, rng: random.Random | None = None) -> None:
        """`seed`: the run's."""
        self.seed = seed
        self._random = rng or random.Random()
        self._lock = threading.Lock()
        self._own: dict[int, _Own] = {}
        self._words: Sequence[HeardPass] = ()

    def hear(self, words: Sequence[HeardPass]) -> None:
        """Others say this at present."""
        with self._lock:
            self._words = words

    def says(self) -> PassRecord:
        """This peer's word. Empty where it has chosen nothing yet."""
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
            own.hand |= set(begun) - own.done  # those too that a stream reads again after a restart
            present, comes = min(self._pass_of_most(source, parts), LATEST), not (begun or own.done)
            if present > own.number + (not comes):  # a newcomer goes where most are, and so does who has lost them
                own.begin(present)
            if not (free := own.left() - self._taken(source, own)):
                own.begin(own.number + 1)
                free = own.left() - self._taken(source, own) or own.left()
            # Nobody is likely to take the next in the row before this peer's word is there, unless it walks behind.
            alone = begun and begun[-1] not in self._taken(source, own)
            following = (begun[-1] + 1) % parts if alone else -1
            part = following if following in free else self._random.choice(sorted(free))
            own.hand.add(part)
            return own.number, part

    def _pass_of_most(self, source: int, parts: int) -> int:
        """Half of those that are there are in this pass or behind it; 0: of none that is known."""
        numbers = sorted(told.number for told, there in self._told_of(source, parts) if there)
        return numbers[(len(numbers) - 1) // 2] if numbers else 0

    def _taken(self, source: int, own: _Own) -> set[int]:
        """The pieces of this peer's pass that others have."""
        taken = 0
        for told, there in self._told_of(source, own.parts):
            if told.number == own.number:
                taken |= _number(told.done) | (_number(told.hand) if there else 0)
            elif told.number == own.number + 1:
                taken |= _number(told.before)
        return {part for part in range(own.parts) if taken >> part & 1}

    def _told_of(self, source: int, parts: int) -> Iterator[tuple[SourceRead, bool]]:
        """The words about a source that is divided into as many pieces there: others have other data."""
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
