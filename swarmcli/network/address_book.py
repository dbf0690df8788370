"""Where peers can be dialed, and who says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from swarmcli.backoff import Backoff
from swarmcli.network.addresses import Scope, is_direct, readable
from swarmcli.network.bounds import MAX_ADDRESSES
from swarmcli.network.identity import PeerID
from swarmcli.recent import Recent

# How long addresses that fail rest, and when they are forgotten. Times in seconds.
_FIRST_PAUSE = 2.0  # for which an address that did not answer is not tried again: twice as long each time …
_LONGEST_PAUSE = 600.0  # … up to this
_FIRST_HEARD = MAX_ADDRESSES // 2  # addresses of a peer, those heard first, that later hearsay does not displace
_FAILURES = 3  # in a row, and …
_OUTAGE = 600.0  # … over so long a time, before a proven address is forgotten: a link may be down for a while


@dataclass(slots=True)
class _Entry:
    proven: tuple[str, ...] = ()  # we dialed it, and this peer answered there
    told: tuple[str, ...] = ()  # what the peer says of itself
    heard: tuple[str, ...] = ()  # what others say of it; they may err or lie
    word: tuple[str, ...] = ()  # those of the first two that others can use
    # Address → how often it has failed in a row, and since when; the latest failure last.
    failing: Recent[str, tuple[int, float]] = field(default_factory=partial(Recent, 2 * MAX_ADDRESSES))


class AddressBook:
    """Where each peer can be dialed: proven addresses first, then those that it tells, then hearsay; none displaces a
    better one. Bounded: peers that were named or asked for least recently go first, and a peer known by hearsay never
    displaces one that has answered or told something.

    Everything is parsed as it comes in. What a stranger has written badly is left out and costs nobody else anything.
    """

    def __init__(self, max_peers: int, now: Callable[[], float] = lambda: 0.0) -> None:
        """`now`: the loop's time in seconds, by which addresses that failed are tried again."""
        self._now = now
        most = 2 * max_peers * MAX_ADDRESSES
        self._pauses = Backoff[tuple[PeerID, str]](_FIRST_PAUSE, _LONGEST_PAUSE, most=most)
        self._met: Recent[PeerID, _Entry] = Recent(max_peers)  # who has answered or told something
        self._heard_of: Recent[PeerID, _Entry] = Recent(max_peers)  # all others; as many again

    def __len__(self) -> int:
        return len(self._met) + len(self._heard_of)

    def answered(self, peer: PeerID, address: str) -> None:
        """The peer has just proved that it is at this address: it is tried first from now on."""
        entry = self._meet(peer)
        entry.failing.pop(address, None)
        self._pauses.forget((peer, address))
        entry.proven = (address, *(other for other in entry.proven if other != address))[:MAX_ADDRESSES]
        entry.word = readable((*entry.proven, *entry.told), peer)

    def told(self, peer: PeerID, addresses: Iterable[str], horizon: Scope = Scope.HOST) -> None:
        """Replaces what the peer said of itself by what it says now. No addresses: it cannot be dialed."""
        entry = self._meet(peer)
        entry.told = readable(addresses, peer, horizon)
        entry.word = readable((*entry.proven, *entry.told), peer)

    def learn(self, peer: PeerID, addresses: Iterable[str], horizon: Scope = Scope.HOST) -> None:
        """Takes in hearsay. No addresses: nothing new."""
        found = readable(addresses, peer, horizon)
        if not found:
            return
        entry = self._met.get(peer) or self._heard_of.get(peer)
        if entry is None:
            entry = self._heard_of[peer] = _Entry()
        # The addresses that were heard first keep half of the places until they have failed: otherwise a liar that
        # repeats itself could displace what honest peers have said.
        first = entry.heard[-_FIRST_HEARD:]
        now = self._now()
        new = [each for each in found if not self._pauses.rests((peer, each), now)]
        later = dict.fromkeys(each for each in (*new, *entry.heard) if each not in first)
        entry.heard = (*tuple(later)[: MAX_ADDRESSES - len(first)], *first)
        self._touch(peer)

    def failed(self, peer: PeerID, address: str, *, somebody_else: bool = False) -> None:
        """Nobody, or `somebody_else`, answers there: the address is not tried again for a while. Hearsay is dropped at
        once, a proven address if somebody else answers or after it has failed for long; what the peer says of itself
        stays until it says otherwise."""
        entry = self._met.get(peer) or self._heard_of.get(peer)
        if entry is None:
            return
        now = self._now()
        count, since = entry.failing.get(address, (0, now))
        entry.failing[address] = count + 1, since
        self._pauses.add((peer, address), now)
        entry.heard = _without(entry.heard, address)
        lasting = count + 1 >= _FAILURES and now - since >= _OUTAGE
        if somebody_else or lasting:
            entry.proven = _without(entry.proven, address)
            entry.word = readable((*entry.proven, *entry.told), peer)

    def addresses_of(self, peer: PeerID) -> tuple[str, ...]:
        """Where to try now, the best first: proven, told, heard; all direct ones before all relays."""
        entry = self._met.get(peer) or self._heard_of.get(peer)
        if entry is None:
            return ()
        self._touch(peer)
        now = self._now()
        sound = [address for address in entry.proven if address not in entry.failing]
        talk = [each for each in (*entry.told, *entry.heard) if not self._pauses.rests((peer, each), now)]
        # A proven address stays in the list while it fails, since this peer may be the one that is cut off; but last.
        found = list(dict.fromkeys((*sound, *talk, *entry.proven)))
        return tuple(sorted(found, key=lambda address: not is_direct(address)))[:MAX_ADDRESSES]

    def first_hand(self, peer: PeerID) -> tuple[str, ...]:
        """Where the peer has answered us."""
        entry = self._met.get(peer)
        return entry.proven if entry is not None else ()

    def own_word(self, peer: PeerID) -> tuple[str, ...]:
        """Where the peer has answered us or says that it can be dialed: what may be handed on, as hearsay."""
        entry = self._met.get(peer)
        return entry.word if entry is not None else ()

    def _meet(self, peer: PeerID) -> _Entry:
        entry = self._heard_of.pop(peer, None) or self._met.get(peer) or _Entry()
        self._met[peer] = entry
        return entry

    def _touch(self, peer: PeerID) -> None:
        for entries in (self._met, self._heard_of):
            if peer in entries:
                entries.move_to_end(peer)


def _without(addresses: tuple[str, ...], gone: str) -> tuple[str, ...]:
    return tuple(address for address in addresses if address != gone)
