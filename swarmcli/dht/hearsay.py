"""Who names contacts that are not there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from swarmcli.network.identity import PeerID

_CREDIT = 4  # contacts on one peer's word that a search asks before any of them has answered …
_LEAST = 1  # … and on the word of one whose contacts were not there
_HALVED_AFTER = 60.0  # seconds: after a crash of many nodes honest ones too name the dead for a while
_MOST = 1024  # peers that are remembered


class Hearsay:
    """Debts of those who named contacts that did not answer, over all searches of a node. Times are the loop's."""

    def __init__(self) -> None:
        self._debts: OrderedDict[PeerID, tuple[float, float]] = OrderedDict()  # how many, as of when
        self._now = 0.0

    def missed(self, namers: Iterable[PeerID | None], now: float) -> None:
        """A contact that these have named is not there. None: this node itself knew it."""
        self._now = now
        for namer in namers:
            if namer is not None:
                self._debts[namer] = self._debt(namer) + 1, now
                self._debts.move_to_end(namer)
        while len(self._debts) > _MOST:
            self._debts.popitem(last=False)

    def credit(self, namer: PeerID) -> int:
        """How many of its contacts a search asks before any of them has answered."""
        return max(_LEAST, _CREDIT - int(self._debt(namer)))

    def at(self, now: float) -> Hearsay:
        """As of now: debts are forgotten in time."""
        self._now = now
        return self

    def _debt(self, namer: PeerID) -> float:
        debt, since = self._debts.get(namer, (0.0, self._now))
        return debt * 0.5 ** ((self._now - since) / _HALVED_AFTER)
