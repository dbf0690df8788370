"""Which part of a pass over the data a peer reads next, when all peers of a run share the pass.

A pass over a source has some hundred parts, in an order that all draw from the run's seed. Each peer says which parts
it has read in its present pass, and which it has in hand. It takes next the part that the fewest have of those that it
was in rounds with, then the fewest of all; of several it takes the one behind its last, or a random one. So whoever
claims what it has not read makes others read it a little later, and whoever claims everything, under any number of
names, changes nothing.

A pass ends for a peer when somebody has each part, and the swarm has computed as many samples as a pass takes, by what
this peer's own parts took of its own samples: claims alone would end it at once. One that has come in the midst of a
pass knows less, and goes on with most of those that it was in rounds with.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pydantic
from pydantic import ConfigDict, Field

from swarmcli.training.task import Parts

Bits = Annotated[bytes, Field(max_length=64)]  # a part each, the lowest bit of the first byte first


class SourceRead(pydantic.BaseModel):
    """One peer's word about one source."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    number: Annotated[int, Field(ge=0, lt=1 << 32)]  # of the pass
    began: Annotated[int, Field(ge=0, lt=1 << 62)]  # the samples that the swarm had seen by then
    parts: Annotated[int, Field(ge=1, le=512)]
    read: Bits
    before: Bits  # the same of the pass before


class PassRecord(pydantic.BaseModel):
    """One peer's word about all sources, by their numbers. Those that a recipe lists behind the 16th are not shared."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    sources: Annotated[list[SourceRead], Field(max_length=16)] = []


@dataclass(frozen=True, slots=True)
class PassOptions:
    volume: float = 1.0  # of a pass, by the samples that the swarm has counted, before it may end
    least: float = 0.25  # of a pass, before others' words end it
    latest: int = 1 << 30  # pass that a newcomer begins with: numbers go on from there, and have to fit a record
    sources: int = 16  # that are told to others: a record is some hundred bytes for each


@dataclass(frozen=True, slots=True)
class HeardPass:
    """Another peer's word about itself."""

    read: PassRecord
    in_hand: PassRecord
    vouched: bool  # this peer was in rounds with it, or the run's owner has invited it


@dataclass(slots=True)
class _Own:
    """This peer's place in one source."""

    number: int
    began: int  # samples of the swarm, when this peer began the pass
    parts: int = 0
    read: set[int] = field(default_factory=set)
    in_hand: set[int] = field(default_factory=set)
    before: set[int] = field(default_factory=set)
    has_followed: bool = False  # others into their pass, by their word alone
    settled: int = 0  # parts, in all passes since this peer started …
    samples: int = 0  # … and its samples by then


class SharedPass:
    """One peer's part of the passes that its run shares. Its stream asks in one thread, the network tells in
    another."""

    def __init__(
        self,
        seed: str,
        samples: Callable[[], tuple[int, int]],
        *,
        rng: random.Random | None = None,
        options: PassOptions = PassOptions(),
    ) -> None:
        """`seed`: the run's. `samples()`: computed by this peer since it started, and seen by the swarm in all."""
        self.seed = seed
        self._samples = samples
        self._random = rng or random.Random()
        self._options = options
        self._lock = threading.Lock()
        self._own: dict[int, _Own] = {}
        self._words: Sequence[HeardPass] = ()

    def hear(self, words: Sequence[HeardPass]) -> None:
        """Others say this at present."""
        with self._lock:
            self._words = words

    def says(self) -> tuple[PassRecord, PassRecord]:
        """This peer has read this, and has this in hand. Empty where it has chosen nothing yet."""
        with self._lock:
            numbers = range(min(max(self._own, default=-1) + 1, self._options.sources))
            own = [self._own.get(n, _Own(0, 0)) for n in numbers]
            return (
                PassRecord(sources=[_told(each, each.read) for each in own]),
                PassRecord(sources=[_told(each, each.in_hand) for each in own]),
            )

    def settle(self, passes: Sequence[int], begun: Sequence[Parts]) -> None:
        """See Reading. The last part of each source is still being read."""
        samples, of_swarm = self._samples()
        with self._lock:
            for n, (number, parts) in enumerate(zip(passes, begun, strict=True)):
                own = self._own.setdefault(n, _Own(number, of_swarm, read=set(parts[:-1])))
                if number == own.number:
                    own.settled, own.samples = own.settled + len(set(parts[:-1]) - own.read), samples
                    own.read |= set(parts[:-1])
                    own.in_hand = own.in_hand - own.read | set(parts[-1:])

    def next_part(self, source: int, parts: int, number: int, begun: Parts) -> tuple[int, int]:
        """See Reading."""
        _, of_swarm = self._samples()
        with self._lock:
            own = self._own.setdefault(source, _Own(number, of_swarm))
            own.parts = parts
            own.in_hand |= set(begun) - own.read  # those too that a stream reads again after a restart
            present = self._pass_of_most(source, own)
            if not own.settled and not begun and present > own.number:
                own.number, own.began = min(present, self._options.latest), of_swarm  # a newcomer goes where most are
            elif len(own.read | own.in_hand) >= parts or self._may_end(source, own, of_swarm, present):
                own.before, own.read, own.in_hand = own.read | own.in_hand, set(), set()
                own.number, own.began = own.number + 1, of_swarm
            # A vouched word counts more than all others together.
            held = self._holders(source, own, vouched=True) * (len(self._words) + 1)
            held += self._holders(source, own, vouched=False)
            free = [part for part in range(parts) if part not in own.read and part not in own.in_hand]
            fewest = min(held[part] for part in free)
            best = [part for part in free if held[part] == fewest]
            part = self._random.choice(best)
            if begun and number == own.number and not held[begun[-1]]:
                # Nobody is likely to take the next in the row before this peer's word is there, unless it walks behind.
                part = following if (following := (begun[-1] + 1) % parts) in best else part
            own.in_hand.add(part)
            return own.number, part

    def _pass_of_most(self, source: int, own: _Own) -> int:
        """More than half of those that are there and vouched for are in this pass or behind it; 0: of none that is
        known. Whoever has something in hand is there."""
        told = (_of_source(word.in_hand, source, own.parts) for word in self._words if word.vouched)
        numbers = sorted(each.number for each in told if each is not None)
        return numbers[(len(numbers) - 1) // 2] if numbers else 0

    def _may_end(self, source: int, own: _Own, of_swarm: int, present: int) -> bool:
        """Whether this peer begins another pass. Others' words end none before a part of it is computed, by this peer's
        own measure, or a liar would have it read the same part for ever; but one that has come at the end of a pass
        follows once."""
        if present > own.number and not own.has_followed:
            own.has_followed = True
            return True
        if not own.settled:
            return False  # how many samples a part takes is not known yet
        of_pass = own.parts * own.samples / (own.settled + 1)  # the last part of a block is read, and not yet left
        if of_swarm - own.began < self._options.least * of_pass:
            return False
        return present > own.number or self._has_ended(source, own, of_swarm, of_pass)

    def _has_ended(self, source: int, own: _Own, of_swarm: int, of_pass: float) -> bool:
        held = self._holders(source, own, vouched=True) + self._holders(source, own, vouched=False)
        if any(not held[part] for part in range(own.parts) if part not in own.read | own.in_hand):
            return False
        told = [each.began for each in self._told_by_vouched(source, own) if each.number == own.number]
        began = sorted([own.began, *told])  # one that has come later than the pass began knows it by others' word
        return of_swarm - began[(len(began) - 1) // 2] >= self._options.volume * of_pass

    def _holders(self, source: int, own: _Own, *, vouched: bool) -> npt.NDArray[np.int64]:
        """By how many each part of this peer's pass is read or about to be, of those that are vouched for or not."""
        found = np.zeros(own.parts, dtype=np.int64)
        for word in self._words:
            if word.vouched != vouched:
                continue
            bits = 0
            if (told := _of_source(word.read, source, own.parts)) is not None and told.number - own.number in (0, 1):
                bits |= int.from_bytes(told.read if told.number == own.number else told.before, "little")
            if (told := _of_source(word.in_hand, source, own.parts)) is not None and told.number == own.number:
                bits |= int.from_bytes(told.read, "little")
            held = np.frombuffer(bits.to_bytes(64, "little"), dtype=np.uint8)
            found += np.unpackbits(held, bitorder="little")[: own.parts]
        return found

    def _told_by_vouched(self, source: int, own: _Own) -> list[SourceRead]:
        told = [_of_source(word.read, source, own.parts) for word in self._words if word.vouched]
        return [each for each in told if each is not None]


def _of_source(record: PassRecord, source: int, parts: int) -> SourceRead | None:
    """The word about a source, if it is divided into as many parts there: others have other data."""
    told = record.sources[source] if source < len(record.sources) else None
    return told if told is not None and told.parts == parts else None


def _told(own: _Own, parts: set[int]) -> SourceRead:
    return SourceRead(
        number=own.number,
        began=own.began,
        parts=max(1, own.parts),
        read=_bits_of(parts),
        before=_bits_of(own.before),
    )


def _bits_of(parts: set[int]) -> bytes:
    bits = sum(1 << part for part in parts)
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")
