"""The book of a run: what each identity has given, as one monitor counts it. No input or output here.

A monitor is a member of every round, so it learns with each epoch what the round has counted of each peer. It keeps

    watch    what it has seen itself since it came (or since it last missed an epoch)
    own      what it had seen itself before that, in earlier lives too
    before   what it takes for true of all the time before the watch: its own, and what other monitors told it

and what it says of a peer is `before` plus `watch`. Others' books are of another epoch each. They are made comparable
by taking off what this monitor has seen itself since it came: what is left of each is a *voice* about `before`.

Three voices and more: of each number the median holds, so one that lies moves nothing beyond what others say. Fewer:
the fullest is believed, and the book says by how many it is vouched for. In any case nobody gets less than this
monitor has seen itself, and all together no more than the samples of the run, which the lineage names: what a liar
gives itself it has to take from what nobody here has seen.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from statistics import median_low
from typing import Annotated, TypeAlias

import msgspec

from swarmcli.events import Contribution, EpochCredited
from swarmcli.words import harmless

MOST_ENTRIES = 16_384  # identities in a book; those with the least give way
MOST_CREDITS = 64  # epochs by which another's book may be behind
MOST_NAME = 64  # characters
FULL = 0.5  # of the fullest voice: one that knows less than this of the time before says nothing about it
DIFFERS = 0.01  # of a number, beyond which two books do not say the same
ROUNDING = 0.5  # samples for each epoch, by which a lineage's count may differ from the sum of what was counted

_Amount = Annotated[float, msgspec.Meta(ge=0, lt=1e15)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Moment = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]  # seconds since 1970, of which every program can make a date
_Text = Annotated[str, msgspec.Meta(max_length=MOST_NAME)]


class Entry(msgspec.Struct):
    """One identity's part in a book, as it travels."""

    samples: _Amount = 0.0
    hours: _Amount = 0.0
    rounds: _Count = 0
    reduced: _Count = 0
    uptime: _Amount = 0.0  # seconds
    first: Moment = 0.0  # 0: unknown
    last: Moment = 0.0
    name: _Text = ""
    team: _Text = ""

    @property
    def worth(self) -> tuple[float, int, float]:
        """By which entries are ranked, and kept when a book is full."""
        return self.samples, self.reduced, self.uptime


Entries: TypeAlias = dict[str, Entry]  # by peer id
NUMBERS = ("samples", "hours", "rounds", "reduced", "uptime")


class Mark(msgspec.Struct, frozen=True):
    """A place in the run: so many epochs, and the samples of all of them."""

    epoch: _Count = 0
    samples: _Count = 0


class Told(msgspec.Struct, frozen=True):
    """Another monitor's book: all entries, until a mark. `since`: the first epoch of which it tells."""

    until: Mark
    since: _Count
    entries: Entries


class Kept(msgspec.Struct, frozen=True):
    """A book as a journal keeps it: `own` is what the monitor has seen itself."""

    until: Mark
    since: int
    vouched: int
    total: Entries
    own: Entries


class Dispute(msgspec.Struct, frozen=True):
    """Of one peer two monitors count unlike samples: `says` is what `monitor` does, `holds` what holds here."""

    monitor: str
    peer: str
    says: float
    holds: float


class Book:
    """One monitor's book. Not for several threads at once."""

    def __init__(self, *, exact: bool = True, most: int = MOST_ENTRIES) -> None:
        """`exact`: the run's lineage counts what its rounds count. Otherwise (local updates, several groups an epoch)
        it counts epochs, and bounds no more than roughly what all have together."""
        self._exact, self._most = exact, most
        self._own: Entries = {}
        self._before: Entries = {}
        self._watch: Entries = {}
        self._credits: deque[EpochCredited] = deque(maxlen=MOST_CREDITS)
        self.began: Mark | None = None  # of the watch
        self.until = Mark()
        self.since = 0  # the first epoch of which it tells
        self.left = -1  # the last epoch that was seen here before the watch; -1: none
        self.vouched = 0  # voices on which `before` rests; 0: nobody's but its own

    @classmethod
    def restore(cls, kept: Kept, *, exact: bool = True) -> Book:
        """As it was kept; what follows is another watch."""
        book = cls(exact=exact)
        book._own, book._before = kept.own, kept.total
        book.until, book.since, book.vouched = kept.until, kept.since, kept.vouched
        book.left = kept.until.epoch if kept.own else -1
        return book

    # what is seen here

    def begin(self, mark: Mark) -> None:
        """This monitor has come to the run, or missed epochs, and stands there now."""
        if self.began is None and not self._before:
            self.since = mark.epoch
        if self._watch:
            self.left = self.until.epoch
            for peer, entry in self._watch.items():
                _add(self._own, peer, entry)
                _add(self._before, peer, entry)
        self._watch, self.began, self.until = {}, mark, mark
        self._credits.clear()

    def credit(self, event: EpochCredited, now: float) -> set[str]:
        """The round of an epoch counted so much of each; returns of whom. An epoch that was counted is not again."""
        if self.until.epoch - MOST_CREDITS <= event.epoch <= self.until.epoch:
            return set()  # of a run that was begun anew, or from an old checkpoint, epochs are counted from there
        if self.began is None or event.epoch != self.until.epoch + 1:
            samples = round(math.fsum(event.samples.values()))
            self.begin(Mark(event.epoch - 1, max(0, event.run_samples - samples)))
        self.until = Mark(event.epoch, event.run_samples)
        self._credits.append(event)
        changed = set(event.samples) | set(event.reduced)
        for peer, entry in _credited(event).items():
            entry.first = entry.last = now
            _add(self._watch, peer, entry)
        self._make_room()
        return changed

    def saw(self, peer: str, name: str, team: str, seconds: float, now: float) -> None:
        """The peer answered for so long, and calls itself so."""
        entry = Entry(
            uptime=seconds, first=now, last=now, name=harmless(name)[:MOST_NAME], team=harmless(team)[:MOST_NAME]
        )
        _add(self._watch, peer, entry)
        self._make_room()

    def _make_room(self) -> None:
        for entries in (self._watch, self._before, self._own):
            if len(entries) > self._most:
                spare = sorted(entries, key=lambda peer: entries[peer].worth)[: len(entries) - self._most * 15 // 16]
                for peer in spare:
                    del entries[peer]

    # what it says

    def entry(self, peer: str) -> Entry | None:
        """What holds of one peer; None: nothing is known."""
        found: Entries = {}
        for entries in (self._before, self._watch):
            if peer in entries:
                _add(found, peer, entries[peer])
        return found.get(peer)

    def entries(self) -> Entries:
        """What holds of everyone."""
        found = _copied(self._before)
        for peer, entry in self._watch.items():
            _add(found, peer, entry)
        return found

    def told(self) -> Told:
        """As other monitors are told."""
        return Told(self.until, self.since, self.entries())

    def kept(self, peers: Iterable[str]) -> Kept:
        """Of these peers, as the journal keeps it."""
        own: Entries = {}
        total: Entries = {}
        for peer in peers:
            if (entry := self.entry(peer)) is not None:
                total[peer] = entry
                for entries in (self._own, self._watch):
                    if peer in entries:
                        _add(own, peer, entries[peer])
        return Kept(self.until, self.since, self.vouched, total, own)

    @property
    def size(self) -> int:
        """How many entries it has, roughly."""
        return len(self._before) + len(self._watch)

    @property
    def witnessed(self) -> float:
        """Of which this monitor has seen rounds that counted them."""
        return samples_of(self._own) + samples_of(self._watch)

    # what others say

    def _marks(self) -> dict[int, int]:
        marks = {event.epoch: event.run_samples for event in self._credits}
        return marks if self.began is None else {self.began.epoch: self.began.samples} | marks

    def knows(self, mark: Mark) -> bool:
        """Whether another's book of that epoch can be compared: it is neither ahead nor from before the watch."""
        return mark.epoch in self._marks()

    def objection(self, told: Told) -> str:
        """Why another's book cannot be; "" if it may."""
        marks = self._marks()
        if told.until.epoch not in marks:
            return "it is of an epoch that is not known here"
        if told.until.samples != marks[told.until.epoch]:
            return "it is of another lineage"
        if len(told.entries) > self._most:
            return "it names more peers than a book has"
        if samples_of(told.entries) > self._most_until(told.until):
            return "it counts more samples than the run has"
        if any(entry.rounds > told.until.epoch for entry in told.entries.values()):
            return "it counts more rounds than the run has"
        return ""

    def reconcile(self, others: Mapping[str, Told]) -> list[Dispute]:
        """Takes over what holds of the time before the watch, by what these monitors say, whose books nothing is
        objected to; and returns what any of them says otherwise. Without effect before the watch has begun."""
        if self.began is None:
            return []
        differences = {monitor: self._less_the_watch(told) for monitor, told in others.items()}
        voices = {
            monitor: bounded(_positive(entries), self._own, self._most_before)
            for monitor, entries in differences.items()
        }
        fullest = max([samples_of(self._own), *map(samples_of, voices.values())])
        heard = {name: voice for name, voice in voices.items() if samples_of(voice) >= FULL * fullest}
        if heard and self.began.samples:  # otherwise there was nothing before
            self._take(heard, fullest)
            self.since = min([self.since, *(told.since for told in others.values())])
        return [dispute for name in heard for dispute in self._disputes(name, others[name], differences[name])]

    def reconcile_all(self, others: Mapping[str, Told]) -> tuple[list[str], list[Dispute]]:
        """The same; and of whom something else holds now."""
        before = _copied(self._before)
        disputes = self.reconcile(others)
        peers = before.keys() | self._before.keys()
        return [peer for peer in peers if before.get(peer) != self._before.get(peer)], disputes

    def _less_the_watch(self, told: Told) -> Entries:
        """What it says of the time before the watch; below nothing where it tells of less than was seen since.

        Where it only began to watch after this monitor had left, it knows nothing of what was seen here before, and
        that is added."""
        seen = _copied(self._watch)
        for event in self._credits:
            if event.epoch > told.until.epoch:
                for peer, entry in _credited(event).items():
                    _add(seen, peer, entry, -1)
        voice = _copied(told.entries)
        for peer, entry in seen.items():
            _add(voice, peer, entry, -1)
        if 0 <= self.left <= told.since:
            for peer, entry in self._own.items():
                _add(voice, peer, entry)
        return voice

    def _take(self, heard: Mapping[str, Entries], fullest: float) -> None:
        """What was vouched for by more than say it now stays, unless those know more; see `merged`."""
        own_is_full = bool(self._own) and samples_of(self._own) >= FULL * fullest
        count = len(heard) + own_is_full
        if count >= 3:
            chosen = _medians([*heard.values(), *([self._own] if own_is_full else [])])
        elif samples_of(self._own) >= (1 - DIFFERS) * fullest:
            chosen, count = self._own, 0  # one's own eyes, where nothing was missed
        else:
            chosen = max(sorted(heard.items()), key=lambda item: samples_of(item[1]))[1]
        if count < self.vouched and samples_of(chosen) <= (1 + DIFFERS) * samples_of(self._before):
            return
        held, more = joined(self._own, self._before), count > self.vouched
        before = merged(held, chosen, self._most_before, seen=self._own, more=more)
        self._before = {peer: entry for peer, entry in before.items() if any(entry.worth)}
        whole = samples_of(chosen) >= (1 - DIFFERS) * samples_of(before)
        self.vouched = count if whole else min(count, self.vouched or count)
        self._make_room()

    @property
    def _most_before(self) -> float:
        """Samples that all together may have given before the watch."""
        assert self.began is not None
        return self._most_until(self.began)

    def _most_until(self, mark: Mark) -> float:
        return most_samples(mark, exact=self._exact)

    def _disputes(self, monitor: str, told: Told, difference: Entries) -> list[Dispute]:
        """`difference`: what it says, less what was seen since this monitor came."""
        found = []
        for peer in self._before.keys() | difference.keys():
            more = difference.get(peer, Entry()).samples - self._before.get(peer, Entry()).samples
            says = told.entries.get(peer, Entry()).samples
            if abs(more) > DIFFERS * max(says, says - more) + 1:
                found.append(Dispute(monitor, peer, says, max(0.0, says - more)))
        return sorted(found, key=lambda each: -abs(each.says - each.holds))


def most_samples(mark: Mark, *, exact: bool) -> float:
    """How many all together may have; see `Book` for `exact`."""
    return mark.samples + ROUNDING * mark.epoch if exact else 2.0 * mark.samples


def joined(held: Entries, more: Entries) -> Entries:
    """Of each number of each peer the greater one: both tell of the same epochs, and sums would count these twice."""
    found = _copied(held)
    for peer, entry in more.items():
        mine = found.setdefault(peer, Entry())
        for number in (*NUMBERS, "last"):
            setattr(mine, number, max(getattr(mine, number), getattr(entry, number)))
        mine.first = min(mine.first, entry.first) if mine.first and entry.first else mine.first or entry.first
        mine.name, mine.team = mine.name or harmless(entry.name), mine.team or harmless(entry.team)
    return found


def merged(held: Entries, told: Entries, most: float, *, seen: Entries, more: bool) -> Entries:
    """What holds once something else is told. Nobody's part becomes smaller while all that was said can be true
    together.

    Where it cannot be, since the run has no more samples than `most`, somebody has lied: then `more` voices than before
    replace all but what was `seen` here, and others add no more than there is room for."""
    if samples_of(held) > most or (more and samples_of(joined(held, told)) > most):
        held = seen
    return bounded(joined(held, told), held, most)


def bounded(entries: Entries, held: Entries, most: float) -> Entries:
    """Together no more samples than `most`: what these entries have beyond those held is cut in proportion."""
    beyond = {peer: max(0.0, entry.samples - held.get(peer, Entry()).samples) for peer, entry in entries.items()}
    room = max(0.0, most - samples_of({peer: held[peer] for peer in entries.keys() & held.keys()}))
    if (more := math.fsum(beyond.values())) > room:
        for peer, entry in entries.items():
            entry.samples += beyond[peer] * (room / more - 1)
    return entries


def _credited(event: EpochCredited) -> Entries:
    hours = max(0.0, event.seconds) / 3600
    return {
        peer: Entry(event.samples.get(peer, 0.0), hours, 1, event.reduced.get(peer, 0))
        for peer in event.samples.keys() | event.reduced.keys()
    }


def samples_of(entries: Entries) -> float:
    """Of all together."""
    return math.fsum(entry.samples for entry in entries.values())


def _copied(entries: Entries) -> Entries:
    return {peer: copy(entry) for peer, entry in entries.items()}


def _add(entries: Entries, peer: str, more: Entry, times: int = 1) -> None:
    if (entry := entries.get(peer)) is None:
        entry = entries[peer] = Entry()
    entry.samples += times * more.samples
    entry.hours += times * more.hours
    entry.rounds += times * more.rounds
    entry.reduced += times * more.reduced
    entry.uptime += times * more.uptime
    entry.first = min(entry.first, more.first) if entry.first and more.first else entry.first or more.first
    entry.last = max(entry.last, more.last)
    entry.name, entry.team = more.name or entry.name, more.team or entry.team


def _positive(entries: Entries) -> Entries:
    """Nothing below zero: two monitors do not see the same seconds."""
    found = _copied(entries)
    for entry in found.values():
        if min(entry.samples, entry.hours, entry.rounds, entry.reduced, entry.uptime) < 0:
            for number in NUMBERS:
                setattr(entry, number, max(0, getattr(entry, number)))
    return found


def _medians(voices: Sequence[Entries]) -> Entries:
    """Of each number of each peer the lower median; texts and moments of the first who has any."""
    found: Entries = {}
    for peer in dict.fromkeys(peer for voice in voices for peer in voice):
        entries = [voice.get(peer) or Entry() for voice in voices]
        numbers = {number: median_low([getattr(entry, number) for entry in entries]) for number in NUMBERS}
        told = next((entry for entry in entries if entry.name or entry.last), Entry())
        if any(numbers.values()):
            found[peer] = msgspec.structs.replace(told, **numbers)
    return found


def contribution(peer: str, entry: Entry) -> Contribution:
    """For people: an entry may have come from any monitor just now, and its texts are a stranger's."""
    return Contribution(
        peer,
        harmless(entry.name),
        harmless(entry.team),
        round(entry.samples),
        entry.hours,
        entry.rounds,
        entry.reduced,
        entry.uptime,
        entry.first,
        entry.last,
    )


def listed(entries: Entries) -> list[Contribution]:
    """Most samples first; among equals who has added up or stayed more."""
    ranked = sorted(entries.items(), key=lambda item: (*(-each for each in item[1].worth), item[0]))
    return [contribution(peer, entry) for peer, entry in ranked]


Contributions: TypeAlias = Callable[[], Sequence[Contribution]]


def agreed(voices: Sequence[Entries]) -> Entries:
    """What holds for somebody who has seen nothing: of three books and more the median of each number, of two the one
    that counts more samples."""
    if len(voices) >= 3:
        # By the second fullest: one that invents samples would otherwise leave itself as the only one with a say.
        full = sorted(map(samples_of, voices))[-2]
        return _medians([voice for voice in voices if samples_of(voice) >= FULL * full])
    return max(voices, key=samples_of, default={})
