"""How long a round waits for whom. What is given are upper bounds; None means that waiting adapts."""

from __future__ import annotations

from dataclasses import dataclass

from swarmcli.compression import CompressionBase, NoCompression

MAX_PART_BYTES = 8 << 20

_FIRST = 60.0  # seconds for a member to begin: it may still be computing its last batch
_SILENCE = 30.0  # seconds between two parts, at most
_SHORTEST_SILENCE = 8.0  # a busy or throttled machine may well take this long now and then
_OF_LONGEST_GAP = 10.0


@dataclass(frozen=True, slots=True)
class AllreduceOptions:
    """Options of a round that members must agree on (the first two), and upper bounds in seconds.

    compression        codec of parts and averages on the wire
    part_size_bytes    of a part on the wire
    allreduce_timeout  for the whole round; then the leader gives it up
    sender_timeout     for a sender's silence, after which it is left out from that part on
    reducer_timeout    for a reducer's silence, after which the round has failed here; None: twice sender_timeout
    """

    compression: CompressionBase = NoCompression()  # noqa: RUF009  # codecs have no state
    part_size_bytes: int = 524288
    allreduce_timeout: float | None = None
    sender_timeout: float | None = None
    reducer_timeout: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.part_size_bytes <= MAX_PART_BYTES:
            raise ValueError(f"part_size_bytes must be 1 to {MAX_PART_BYTES}, got {self.part_size_bytes}")
        for name in ("allreduce_timeout", "sender_timeout", "reducer_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be a positive number of seconds or None, got {value}")

    @property
    def to_begin(self) -> float:
        """Seconds that a member may take to begin."""
        return self.sender_timeout or _FIRST

    @property
    def for_reducer(self) -> float:
        """Seconds between two averages: a reducer itself waits for the slowest sender."""
        return self.reducer_timeout or 2 * self.to_begin


class Silence:
    """How long one sender may stay silent between two parts, judged by the gaps so far."""

    def __init__(self, options: AllreduceOptions) -> None:
        self._most = options.sender_timeout or _SILENCE
        self._longest = 0.0

    def observe(self, gap: float) -> None:
        self._longest = max(self._longest, gap)

    @property
    def limit(self) -> float:
        return min(self._most, _SHORTEST_SILENCE + _OF_LONGEST_GAP * self._longest)
