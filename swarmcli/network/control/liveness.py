"""When to ping a silent peer, and when to take it for dead."""

from __future__ import annotations

from swarmcli.clock import SAMPLE_LIFE
from swarmcli.network.limits import Limits
from swarmcli.network.transports.base import Connection

_MAX_PINGS = 8  # unanswered ones; further pings repeat the last number, so that nobody has to remember more


class Liveness:
    """Counts ticks of the keepalive, not time: a machine that slept or was too busy has not been waiting.

    Nothing heard for a while: ping. Nothing at all heard since a ping was sent, for the timeout: the other end is
    dead. Bytes count, not messages, and any bytes do. An end that hears a long message also pings now and then:
    the sender's own pings stand in line behind it, and without a word from here it would believe itself alone.
    Besides, each end pings at the start (by `ping`) and once a minute, to measure the other's clock and the round trip.
    """

    def __init__(self, connection: Connection, limits: Limits) -> None:
        self._connection = connection
        self._limits = limits
        self._heard = connection.bytes_received  # at the last tick
        self._said = connection.bytes_sent
        self._silent = 0  # ticks without a byte from there, counted anew from the first ping that waits for an answer …
        self._mute = 0  # … and from here
        self._listened = 0  # ticks with bytes from there since the last one with bytes from here
        self._pinged = 0  # pings sent so far; each has its number
        self._answered = 0  # all before this number are answered
        self._since_ping = 0  # ticks

    def dead(self, elsewhere: int = 0) -> bool:
        """To be called once per tick, first. `elsewhere` counts the bytes from there on other connections: where
        streams fill a slow link, pings stand in line behind them."""
        connection = self._connection
        received = connection.bytes_received + elsewhere
        heard, said = received != self._heard, connection.bytes_sent != self._said
        self._heard, self._said = received, connection.bytes_sent
        self._silent = 0 if heard else self._silent + 1
        self._mute = 0 if said else self._mute + 1
        self._listened = 0 if said else self._listened + heard
        return self._unanswered > 0 and self._seconds(self._silent) >= self._limits.keepalive_timeout

    def ping_due(self, watched: bool) -> int | None:
        """The number of the ping to send now, if one is due."""
        patience = self._limits.keepalive_interval if watched else self._limits.keepalive_idle_interval
        if not self._connection.dialed:
            patience *= 1.5  # mostly the dialer's ping comes before, and one of the two is enough
        # One answer that came is no long message: it takes bytes in more than one tick.
        listening = self._listened > 1 and self._seconds(self._mute) >= self._limits.keepalive_timeout / 3
        self._since_ping += 1
        measuring = self._seconds(self._since_ping) >= SAMPLE_LIFE
        if listening or measuring or self._seconds(self._silent) >= patience:
            return self.ping()
        return None

    def ping(self) -> int:
        """The number of a ping that is sent in any case."""
        self._since_ping = 0
        if self._unanswered == 0:
            self._silent = 0  # the timeout runs from here
        if self._unanswered < _MAX_PINGS:
            self._pinged += 1
        return self._pinged - 1

    def answered(self, number: int) -> bool:
        """A pong has come for this ping, and so for those before it. False if there was no such ping."""
        self._answered = max(self._answered, number + 1) if number < self._pinged else self._answered
        return number < self._pinged

    @property
    def _unanswered(self) -> int:
        return self._pinged - self._answered

    def _seconds(self, ticks: int) -> float:
        return ticks * self._limits.keepalive_interval
