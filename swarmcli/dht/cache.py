"""What this node has read or written lately, for readers who do not need the latest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from swarmcli.dht.limits import DHTLimits
from swarmcli.dht.records import Record, merge_all


@dataclass(slots=True)
class _Cached:
    records: dict[bytes, Record]
    read_at: float  # loop time


class ReadCache:
    """Bounded by entries, by bytes (a quarter of the storage's bound) and by age. Keys are ids."""

    def __init__(self, limits: DHTLimits) -> None:
        self._limits = limits
        self._entries: OrderedDict[int, _Cached] = OrderedDict()
        self._size = 0

    def replace(self, number: int, records: dict[bytes, Record], loop_time: float) -> None:
        """What all replicas together hold has been read."""
        self.drop(number)
        self._entries[number] = _Cached(dict(records), loop_time)
        self._size += _size(records.values())
        self._shrink()

    def amend(self, number: int, records: Iterable[Record]) -> None:
        """This node has stored something: readers of the cached rest see it too. Nothing is cached anew."""
        cached = self._entries.get(number)
        if cached is not None:
            self._size -= _size(cached.records.values())
            merge_all(cached.records, records)
            self._size += _size(cached.records.values())
            self._shrink()

    def get(self, number: int, now: float, loop_time: float) -> list[Record] | None:
        """The cached records if they are young and at least one of them is alive at swarm time `now`."""
        cached = self._entries.get(number)
        if cached is None:
            return None
        if loop_time - cached.read_at > self._limits.cache_age:
            self.drop(number)
            return None
        self._entries.move_to_end(number)
        records = list(cached.records.values())
        return records if any(record.expiration > now for record in records) else None

    def drop(self, number: int) -> None:
        cached = self._entries.pop(number, None)
        if cached is not None:
            self._size -= _size(cached.records.values())

    def clear(self) -> None:
        self._entries.clear()
        self._size = 0

    def _shrink(self) -> None:
        while self._entries and (
            len(self._entries) > self._limits.cache_entries or self._size > self._limits.max_storage // 4
        ):
            self.drop(next(iter(self._entries)))


def _size(records: Iterable[Record]) -> int:
    return sum(record.size for record in records)
