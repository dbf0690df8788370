"""When to ping a silent peer, and when to take it for dead."""

from __future__ import annotations

from swarmcli.network.limits import Limits
from swarmcli.network.transport import Connection

_MAX_PINGS = 8  # unanswered ones, beyond which further pings would say nothing new


class Liveness:
    """Counts ticks of the keepalive, not time: a machine that slept or was too busy has not been waiting.

    Nothing heard for a while: ping. Nothing said for a while: ping as well, since the other end may be busy with a
    long message and could otherwise not know that it is being heard. Nothing at all heard since a ping was sent,
    for the timeout: the other end is dead. Bytes count, not messages, and any bytes do.
    """

    def __init__(self, connection: Connection, limits: Limits) -> None:
        self._connection = connection
        self._limits = limits
        self._heard = connection.bytes_received  # at the last tick
        self._said = connection.bytes_sent
        self._silent = 0  # ticks without a byte from there …
        self._mute = 0  # … and from here
        self._pinged = 0  # pings sent so far; each has its number
        self._answered = 0  # all before this number are answered

    def dead(self) -> bool:
        """To be called once per tick, first."""
        connection = self._connection
        self._silent = self._silent + 1 if connection.bytes_received == self._heard else 0
        self._mute = self._mute + 1 if connection.bytes_sent == self._said else 0
        self._heard, self._said = connection.bytes_received, connection.bytes_sent
        unanswered = self._pinged > self._answered
        return unanswered and self._silent * self._limits.keepalive_interval >= self._limits.keepalive_timeout

    def ping_due(self, watched: bool) -> int | None:
        """The number of the ping to send now, if one is due."""
        patience = self._limits.keepalive_interval if watched else self._limits.keepalive_idle_interval
        if not self._connection.dialed:
            patience *= 1.5  # mostly the dialer's ping comes before, and one of the two is enough
        unanswered = self._pinged - self._answered
        if max(self._silent, self._mute) * self._limits.keepalive_interval < patience or unanswered >= _MAX_PINGS:
            return None
        if unanswered == 0:
            self._silent = 0  # the timeout runs from here
        number, self._pinged = self._pinged, self._pinged + 1
        return number

    def answered(self, number: int) -> None:
        """A pong has come for this ping, and so for those before it."""
        self._answered = number + 1
