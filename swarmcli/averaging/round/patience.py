"""How long a round waits for whom. What is given are upper bounds; None means that waiting adapts."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from swarmcli.averaging.checks import check_numbers
from swarmcli.compression import CompressionBase, CompressionInfo, NoCompression

logger = logging.getLogger(__name__)

MAX_PART_BYTES = 8 << 20

_FIRST = 60.0  # seconds for a member to begin: it may still be computing its last batch
_SILENCE = 15.0  # seconds without a single byte in the middle of a stream; a broken connection is noticed sooner
_ROUND_TRIPS = 20.0  # and so many round trips on top


@dataclass(frozen=True, slots=True)
class AllreduceOptions:
    """Options of a round that members must agree on (the first three), and upper bounds in seconds.

    compression        codec of parts and averages on the wire
    tensor_infos       key and role of each tensor, by which that may choose another codec; None: indices and no roles
    part_size_bytes    of a part on the wire
    allreduce_timeout  for the whole round; then the leader gives it up
    sender_timeout     for a sender's silence, after which it is left out from that part on
    reducer_timeout    for a reducer's silence, after which the round has failed here; None: twice sender_timeout
    """

    compression: CompressionBase = NoCompression()  # noqa: RUF009  # codecs have no state
    tensor_infos: tuple[CompressionInfo, ...] | None = None
    part_size_bytes: int = 524288
    allreduce_timeout: float | None = None
    sender_timeout: float | None = None
    reducer_timeout: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.compression, CompressionBase):
            raise TypeError(f"compression must be a codec such as Float16Compression(), got {self.compression!r}")
        check_numbers(part_size_bytes=self.part_size_bytes)
        if not 0 < self.part_size_bytes <= MAX_PART_BYTES:
            raise ValueError(f"part_size_bytes must be 1 to {MAX_PART_BYTES}, got {self.part_size_bytes}")
        for name in ("allreduce_timeout", "sender_timeout", "reducer_timeout"):
            value = getattr(self, name)
            check_numbers(optional=True, **{name: value})
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be a positive number of seconds or None, got {value}")
        if self.sender_timeout and self.reducer_timeout and self.reducer_timeout <= self.sender_timeout:
            logger.warning(
                "reducer_timeout %g s is taken as %g s: a reducer itself waits up to sender_timeout %g s for a sender",
                self.reducer_timeout,
                2 * self.sender_timeout,
                self.sender_timeout,
            )
            object.__setattr__(self, "reducer_timeout", 2 * self.sender_timeout)

    @property
    def to_begin(self) -> float:
        """Seconds that a member may take to begin; what others wait for because of that leaves twice as long."""
        within = min(self.allreduce_timeout or math.inf, self.reducer_timeout or math.inf)
        return self.sender_timeout or min(_FIRST, within / 2)

    @property
    def for_reducer(self) -> float:
        """Seconds between two averages: a reducer itself waits for the slowest sender."""
        return self.reducer_timeout or 2 * self.to_begin

    def for_silence(self, round_trip: float | None) -> float:
        """Seconds that a sender, once it has begun, may take without a byte arriving."""
        return min(self.to_begin, _SILENCE + _ROUND_TRIPS * (round_trip or 0.0))
