"""The peers that this one doubts: they cost a round or its time, and nothing proves that they lied.

    kept others waiting, led badly     no seat in the next group, in 2, 4, … 16 with each further time
    failed as a reducer                nothing to reduce for a minute, for two, four, … 64 with each further time

A doubt is this peer's own affair. It tells nobody, the doubt ends by itself, and a doubted peer takes part again as
soon as a group would be too small without it, or lacks the samples that it has (`admit`). A lie that can be proved is
evidence, and ends in a ban (`bans.py`). There is no third thing: a peer that does not come is missed, which says
nothing against it (`matchmaking/candidates.py`), and a peer that reports more than it stands by is not asked for a
while (`optim/peers/claims.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarmcli.averaging.group import MAX_MEMBERS
from swarmcli.backoff import Backoff
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.recent import Recent


@dataclass(frozen=True, slots=True)
class DoubtOptions:
    """How long a doubt lasts."""

    first: int = 1  # groups without a seat after the first doubt, doubled with each further one …
    longest: int = 16  # … up to this
    # Seconds for which an epoch waits for the samples of a doubted peer, for each group that the peer is kept out of;
    # and for a peer that has spoiled the groups that it led, and would soon lead again.
    seconds_per_group: float = 1.0
    seconds_per_led: float = 15.0
    spared: float = 60.0  # seconds without a part to reduce at first, doubled with each further time …
    longest_spared: float = 3840.0  # … up to this


DOUBTS = DoubtOptions()


@dataclass(slots=True)
class _Doubt:
    reason: str
    groups: int  # without a seat for it, each time
    left: int  # of these groups
    seconds: float  # that an epoch waits instead of each


class Doubts:
    """One for each averager. Groups that go well end a doubt, not time. A doubted peer gets its seat back without that
    where no group can go well without it: the other peers may have nothing to average."""

    def __init__(self, options: DoubtOptions = DOUBTS) -> None:
        self._options = options
        self._doubts: Recent[PeerID, _Doubt] = Recent(MAX_MEMBERS)
        self._spared = Backoff[PeerID](options.spared, options.longest_spared)

    def note(self, peer: PeerID, reason: str, *, lost: bool = False, led: bool = False) -> None:
        """This peer gives cause for doubt: no seat in the next group, and in twice as many each further time.

        `lost`: the connection with it broke meanwhile, as when its address changes. That costs it no seat, unless it
        was in doubt already: a peer that breaks its connections again and again gains nothing by it. `led`: the doubt
        is about its leading: the group that forms without it now is not yet the next one.
        """
        known, options = self._doubts.get(peer), self._options
        groups = options.first if known is None else min(2 * known.groups, options.longest)
        left = 0 if lost and known is None else groups + led
        seconds = options.seconds_per_led if led else options.seconds_per_group
        self._doubts[peer] = _Doubt(reason, groups, left, seconds)

    def spare(self, peers: Iterable[PeerID]) -> None:
        """These failed as reducers: groups that this peer draws up give them nothing to reduce for a while."""
        for peer in peers:
            self._spared.add(peer, loop_time())

    def is_spared(self, peer: PeerID) -> bool:
        """Whether it is to have nothing to reduce."""
        return self._spared.rests(peer, loop_time())

    def has_no_seat(self, peer: PeerID) -> bool:
        """Whether it is to have no seat in the next group."""
        doubt = self._doubts.get(peer)
        return doubt is not None and doubt.left > 0

    def reason(self, peer: PeerID) -> str:
        """The reason of the last doubt; "" for a peer that this one does not doubt."""
        doubt = self._doubts.get(peer)
        return doubt.reason if doubt is not None else ""

    def admit(self, waited: float) -> bool:
        """The group has waited so many seconds for samples that, by the reports, peers outside it have, or for anybody
        to come but these. A peer whose doubt is worth no longer wait gets its seat back, and stays in doubt. Returns
        whether there is such a peer."""
        admitted = [doubt for doubt in self._doubts.values() if 0 < doubt.left * doubt.seconds <= waited]
        for doubt in admitted:
            doubt.left = 0
        return bool(admitted)

    def note_group(self, members: frozenset[PeerID]) -> None:
        """A round of these members has committed: doubted peers outside it have stayed away once more; this peer trusts
        those that took part a little more, and in the end wholly."""
        for peer, doubt in list(self._doubts.items()):
            if doubt.left:
                doubt.left -= peer not in members
            elif peer in members:
                doubt.groups //= 2
            if doubt.groups < self._options.first:
                del self._doubts[peer]
