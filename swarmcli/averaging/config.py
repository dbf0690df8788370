"""The options of an averager, grouped by the component that owns them and checked when they are made."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias, get_args

from swarmcli.averaging.aggregators import Aggregator, Mean
from swarmcli.averaging.checks import MAX_BANDWIDTH, check_numbers, check_text
from swarmcli.compression import CompressionBase, CompressionInfo, NoCompression

MAX_PREFIX = 100  # characters; the prefix is part of method names and keys
MAX_TERMS = 512
MAX_TERM_LENGTH = 256

MAX_PART_BYTES = 8 << 20
MIN_WEIGHT, MAX_WEIGHT = 1e-12, 1e18  # of one sender, besides zero; their ratio is far within the range of float32

LONGEST_TO_BEGIN = 60.0  # seconds for a member to begin its part: it may still be computing its last batch
SILENCE = 15.0  # seconds that a stream may bring no byte in its middle; a broken connection is noticed sooner …
SILENCE_TRIPS = 20.0  # … plus this many round trips
TO_OPEN = 20.0  # seconds for a stream to a reducer that can be dialed: that needs no answer of its round

# strangers: fewer than a third of a group may lie. members: all are honest, and may only fail.
Trust: TypeAlias = Literal["strangers", "members"]

logger = logging.getLogger(__name__)


def _check(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name} must be {expected}, got {value!r}")


@dataclass(frozen=True, slots=True)
class MatchmakingOptions:
    """How groups form. Times are upper bounds in seconds: a complete group starts at once."""

    target_group_size: int | None = None  # groups hold at most this many; None: everyone under the key
    min_group_size: int = 2  # smaller groups do not begin
    min_matchmaking_time: float = 5.0  # how long a group waits while somebody is missing
    request_timeout: float = 3.0  # longest wait for one answer; at most min_matchmaking_time
    seats_per_network: int | None = None  # most followers from one /24 or /48 in one group; None: as many as come

    def __post_init__(self) -> None:
        size, least = self.target_group_size, self.min_group_size
        check_numbers(min_group_size=least, min_matchmaking_time=self.min_matchmaking_time)
        check_numbers(request_timeout=self.request_timeout)
        check_numbers(optional=True, target_group_size=size, seats_per_network=self.seats_per_network)
        seats = self.seats_per_network
        _check(seats is None or seats >= 1, "seats_per_network", seats, "None or at least 1")
        _check(least >= 1, "min_group_size", least, "at least 1")
        _check(size is None or size >= max(least, 2), "target_group_size", size, f"None or at least {max(least, 2)}")
        for name in ("min_matchmaking_time", "request_timeout"):
            value = getattr(self, name)
            _check(math.isfinite(value) and value > 0, name, value, "a positive number of seconds")
        if self.request_timeout > self.min_matchmaking_time:
            # The user did not ask for the default, so it is no mistake.
            usual = {each.name: each.default for each in fields(self)}["request_timeout"]
            level = logging.INFO if self.request_timeout == usual else logging.WARNING
            logger.log(level, "request_timeout %g s is taken as %g s", self.request_timeout, self.min_matchmaking_time)
            object.__setattr__(self, "request_timeout", self.min_matchmaking_time)


@dataclass(frozen=True, slots=True)
class AllreduceOptions:
    """Options of a round. Members must agree on all but the three timeouts.

    compression        codec of parts and averages on the wire
    tensor_infos       key and role of each tensor, by which an adaptive codec chooses another; None: indices, no roles
    part_size_bytes    most bytes of a part on the wire; see `plan.py`
    allreduce_timeout  seconds for the exchange of a round; None: see `pace.py`
    sender_timeout     seconds of a sender's silence, after which it is left out from that part on
    reducer_timeout    seconds of a reducer's silence, after which the round has failed here; None: twice sender_timeout
    trust              whether a minority of the members may lie; says how many of them decide (`certificate.py`)
    aggregator         how the members' parts become one
    max_share          most of the weight that one member has among four and more; 1: no bound. With 0.75 a computer
                       that does three times the work of all others together still counts in full
    audit              share of the averaged parts that members compute again before they vote, 0 to 1. 0: senders sign
                       nothing, and reducers keep nothing. With sixteen members and 0.005 the inputs take 4 % of the
                       time that sending everything takes
    """

    compression: CompressionBase = NoCompression()  # noqa: RUF009  # codecs have no state
    tensor_infos: tuple[CompressionInfo, ...] | None = None
    part_size_bytes: int = 1 << 20
    allreduce_timeout: float | None = None
    sender_timeout: float | None = None
    reducer_timeout: float | None = None
    trust: Trust = "strangers"
    aggregator: Aggregator = Mean()  # noqa: RUF009  # it has no state
    max_share: float = 0.75
    audit: float = 0.005

    def __post_init__(self) -> None:
        _check(self.trust in get_args(Trust), "trust", self.trust, f"one of {', '.join(get_args(Trust))}")
        if not isinstance(self.compression, CompressionBase):
            raise TypeError(f"compression must be a codec such as Float16Compression(), got {self.compression!r}")
        if not isinstance(self.aggregator, Aggregator):
            raise TypeError(f"aggregator must be one such as Median(), got {self.aggregator!r}")
        check_numbers(part_size_bytes=self.part_size_bytes, max_share=self.max_share, audit=self.audit)
        _check(0 < self.max_share <= 1, "max_share", self.max_share, "above 0 and at most 1")
        _check(0 <= self.audit <= 1, "audit", self.audit, "a share from 0 to 1")
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
        """Seconds that a member may take to begin: `sender_timeout`, or half of the time that others wait for a
        reducer."""
        within = min(self.allreduce_timeout or math.inf, self.reducer_timeout or math.inf)
        return self.sender_timeout or min(LONGEST_TO_BEGIN, within / 2)

    @property
    def for_reducer(self) -> float:
        """Seconds that a reducer may take between two averages: it waits for the slowest sender itself."""
        return self.reducer_timeout or 2 * self.to_begin

    def for_silence(self, round_trip: float | None) -> float:
        """Seconds that a sender, once it has begun, may bring no byte. `round_trip`: seconds, or None if unknown."""
        return min(self.to_begin, SILENCE + SILENCE_TRIPS * (round_trip or 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragerConfig:
    """The options of one averager. Averagers of one prefix average with each other."""

    prefix: str
    matchmaking: MatchmakingOptions = field(default_factory=MatchmakingOptions)
    allreduce: AllreduceOptions = field(default_factory=AllreduceOptions)
    run: str = ""  # a peer's averagers of one run share its bans; "": the prefix stands for the run
    meaning: str = ""  # of the tensors, if their shapes do not tell: peers that name another one are refused
    initial_group_bits: str = ""  # the first bucket; the bits change after every round
    by_differences: bool = False  # a lossy codec gets differences from the last average, see `round/differences.py`
    averaging_alpha: float = 1.0  # tensors move by this fraction towards the average
    min_vector_size: int = 0  # elements; nobody reduces fewer
    bandwidth: float | None = None  # relative to other members'; None: as measured in past rounds; 0: reduces nothing
    auxiliary: bool = False  # reduces for others, and its own tensors stay out
    client_mode: bool | None = None  # True: says that nobody can dial this peer; None: as the node
    # Whether others may download from here what `get_state` gives; None: while they can reach this peer, directly or
    # over a relay.
    share_state: bool | None = False
    # Codec of that state. A peer that downloads it with a lossy one does not get every bit of the donor's, and is told.
    state_compression: CompressionBase = NoCompression()  # noqa: RUF009  # codecs have no state
    declare_state_period: float = 30.0  # seconds after which the offer to share is repeated

    def __post_init__(self) -> None:
        check_text(prefix=self.prefix, run=self.run, meaning=self.meaning, initial_group_bits=self.initial_group_bits)
        check_numbers(averaging_alpha=self.averaging_alpha, min_vector_size=self.min_vector_size)
        check_numbers(declare_state_period=self.declare_state_period)
        check_numbers(optional=True, bandwidth=self.bandwidth)
        _check(0 < len(self.prefix) <= MAX_PREFIX, "prefix", self.prefix, f"a text of 1 to {MAX_PREFIX} characters")
        _check(len(self.run) <= MAX_PREFIX, "run", self.run, f"a text of at most {MAX_PREFIX} characters")
        check_group_bits(self.initial_group_bits)
        _check(0 < self.averaging_alpha <= 1, "averaging_alpha", self.averaging_alpha, "above 0 and at most 1")
        _check(self.min_vector_size >= 0, "min_vector_size", self.min_vector_size, "not negative")
        _check(self.declare_state_period > 0, "declare_state_period", self.declare_state_period, "positive")
        codec = self.state_compression
        _check(isinstance(codec, CompressionBase), "state_compression", codec, "a codec such as Float16Compression()")
        speed = self.bandwidth
        _check(speed is None or 0 <= speed <= MAX_BANDWIDTH, "bandwidth", speed, f"None, or 0 to {MAX_BANDWIDTH:g}")


def check_group_bits(bits: str) -> None:
    """Raises ValueError for anything but zeros and ones."""
    _check(set(bits) <= {"0", "1"} and len(bits) <= 32, "group bits", bits, 'at most 32 characters "0" and "1"')


def check_terms(terms: Mapping[str, str]) -> None:
    """Raises ValueError for too many terms, or too long ones."""
    if len(terms) > MAX_TERMS or any(len(part) > MAX_TERM_LENGTH for item in terms.items() for part in item):
        raise ValueError(f"a fingerprint has at most {MAX_TERMS} entries of {MAX_TERM_LENGTH} characters")
