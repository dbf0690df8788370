"""The peers that a searching peer knows of, in the order in which they would lead. No input or output here.

A peer declares itself in its bucket as long as it has an averager, whether it looks for a group or not. While it looks
it is a *candidate*; between its searches it *holds* the bucket, and may look again. Only its own word counts: its
declaration, and what it says to this peer. Times are those of the loop.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import mode

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.find.messages import Candidate, Rank, rank_of, search_id
from swarmcli.averaging.group import Group
from swarmcli.averaging.step_control import RoundRequest
from swarmcli.errors import FingerprintError
from swarmcli.network.identity import PeerID
from swarmcli.recent import Recent

MAX_CANDIDATES = 4096
LIFETIME = 60.0  # seconds for which peers believe a declaration, unless they read it again
MAX_MISSES = 2  # waits in vain, after which no group waits for a peer until it has been in a group with this one
CLOCKS_DIFFER = 1.0  # seconds by which a search may seem to begin in the future
LEAST_QUIET = 0.015  # seconds without news, after which this peer has heard of all that began together with it …
QUIET_TRIPS = 3.0  # … but at least this many times what it took to declare and read
MAX_BACKOFF = 5  # doublings of the time for which an unreachable candidate is passed over


class Memory:
    """One averager's memory from search to search, of at most MAX_CANDIDATES peers.

    A group does not wait again for a peer that did not come within a full wait, until that peer declares another
    search. A peer that declares searches and still stays away could repeat that for ever, hence MAX_MISSES.
    """

    def __init__(self) -> None:
        self.newcomer = True  # this peer has been in no group yet
        self.mates: frozenset[PeerID] = frozenset()  # members of its last group, for which the next one waits a while
        self.last_tag: bytes | None = None  # of the last group …
        self.last_members: frozenset[PeerID] = frozenset()  # … who was in it …
        self.last_began = -math.inf  # … and when it began, in swarm time
        self.only_mates = False  # the next group waits for mates, and for no other peer that is not looking
        self.holders: dict[PeerID, Candidate] = {}  # the peers of the bucket, as they last declared themselves
        self._finished: Recent[PeerID, bytes] = Recent(MAX_CANDIDATES)  # peer → its last search known to have ended
        # peer → its last search when a group waited for it in vain, how often in a row
        self._missed: Recent[PeerID, tuple[bytes, int]] = Recent(MAX_CANDIDATES)

    def read(self, declared: Iterable[Candidate]) -> None:
        """Takes in all declarations of the bucket: a holder that is not among them has left."""
        self.holders = {candidate.peer_id: candidate for candidate in islice(declared, MAX_CANDIDATES)}

    def finish(self, peer: PeerID, search: bytes) -> None:
        """This search of the peer, and so all before it, has ended: declarations of it are out of date."""
        self._finished[peer] = max(search, self._finished.get(peer, b""))

    def has_finished(self, candidate: Candidate) -> bool:
        """Whether the candidate's search, or a later one of it, has ended."""
        return candidate.search <= self._finished.get(candidate.peer_id, b"")

    def expect(self, peers: Iterable[PeerID]) -> None:
        """The next group waits for these peers as for the members of the last one: while they can be reached, and until
        time is up. It waits for no other holder."""
        self.mates, self.only_mates = frozenset(peers), True

    def miss(self, peers: Collection[PeerID]) -> None:
        """The last round went on without these peers: the next group does not wait for them, though they may come."""
        self.mates -= frozenset(peers)
        self.note_missed(peers)

    def note_missed(self, peers: Iterable[PeerID]) -> None:
        """A group waited in vain for these peers, or they could not be reached."""
        for peer in filter(self.waits_for, peers):
            _, times = self._missed.get(peer, (b"", 0))
            self._missed[peer] = (self._search_of(peer), times + 1)

    def note_group(self, group: Group, now: float, *, await_mates: bool) -> None:
        """A group with this peer has begun at swarm time `now`.

        The leader names the searches with which the others came. A search in the future has not ended, though the
        leader says so: otherwise a liar could keep two peers from ever asking each other again.
        """
        latest = search_id(now + CLOCKS_DIFFER, b"\xff" * 8)
        for member in group.members:
            self.finish(member.peer_id, min(member.search, latest))
            self._missed.pop(member.peer_id, None)
        self.last_tag, self.last_began = group.tag, now
        self.last_members = frozenset(member.peer_id for member in group.members)
        self.mates = self.last_members if await_mates else frozenset()
        self.only_mates = self.newcomer = False

    def waits_for(self, peer: PeerID) -> bool:
        """Whether a group may stay open for this peer."""
        search, times = self._missed.get(peer, (b"", 0))
        return times == 0 or (times < MAX_MISSES and self._search_of(peer) > search)

    def idle(self) -> set[PeerID]:
        """Holders that look for no group now, and for which a group may wait."""
        idle = (each for each in self.holders.values() if not each.looking or self.has_finished(each))
        return {holder.peer_id for holder in idle if self.waits_for(holder.peer_id)}

    def _search_of(self, peer: PeerID) -> bytes:
        """The last known search of a peer. It may be later than the declaration that this peer has read: a follower
        reads none, and its mates came to the group with new searches."""
        holder = self.holders.get(peer)
        return max(holder.search if holder is not None else b"", self._finished.get(peer, b""))


@dataclass(slots=True)
class Entry:
    """One candidate's present search, as this peer knows it."""

    candidate: Candidate
    rank: Rank
    since: float  # when this search of it became known
    expires: float
    rests_until: float = 0.0  # it has just answered; this peer does not ask it again before that
    told_at: float = -math.inf  # when this peer last told it that it leads

    @property
    def peer_id(self) -> PeerID:
        return self.candidate.peer_id


class Candidates:
    """The candidates of one peer's bucket that it knows of, without itself."""

    def __init__(
        self,
        me: Candidate,
        memory: Memory,
        request: RoundRequest,
        options: MatchmakingOptions,
        out: Mapping[PeerID, float] | None = None,
    ) -> None:
        """`out`: see below. If there is to be one round of the request's tag, a peer that began another search after
        `request.since` (None: after this one) has had that round, see `outweigh`."""
        self.entries: dict[PeerID, Entry] = {}
        # Members of the last group that are not lost, and peers that have just missed it.
        self.mates = set(memory.mates - {me.peer_id})
        # A preformed group would wait for mere holders at the end of every epoch.
        self.awaits_holders = request.target is None and not memory.only_mates
        self.out = dict(out or {})  # peers that may not be in a group with this one → until then
        self.elsewhere: set[PeerID] = set()  # peers that are in other groups, and will not come to this one
        self.settled_at = math.inf  # by then this peer has heard of all, if it hears nothing new
        self.agreed = False  # a peer with this one's terms has answered it: those that differ are not the whole run
        self.conflicts: dict[PeerID, tuple[tuple[str, ...], float]] = {}  # peer of other terms → keys, its `since`
        self._quiet = LEAST_QUIET
        self._passed: Recent[PeerID, float] = Recent(MAX_CANDIDATES)  # peer → until when, unless it speaks
        self._failures: Recent[PeerID, int] = Recent(MAX_CANDIDATES)  # peer → how often it was out of reach
        self._only_one, self._queue, since = request.only_one, request.queue, request.since
        self._since = me.search if since is None else min(me.search, search_id(since, bytes(8)))
        self._me, self._memory, self._options = me, memory, options

    def read(self, declared: Sequence[Candidate], now: float, duration: float) -> None:
        """Takes in the declarations of this bucket; it took `duration` seconds to declare and read."""
        if declared:  # this peer's own at least, unless the table is out of reach
            self.mates -= self._memory.holders.keys() - {each.peer_id for each in declared}
            self._memory.read(declared)
        for candidate in declared:
            self.learn(candidate, now)
        if self.settled_at == math.inf:
            # Two peers that begin together learn of each other in the time that the slower takes to declare and read.
            self._quiet = max(LEAST_QUIET, QUIET_TRIPS * duration)
            self.settled_at = now + self._quiet

    def learn(self, candidate: Candidate, now: float, *, direct: bool = False) -> None:
        """Takes in the declaration of a candidate, or, with `direct`, what the candidate itself says to this peer. Then
        even an older search replaces a later one, and the candidate is no longer passed over."""
        peer, known = candidate.peer_id, self.entries.get(candidate.peer_id)
        if self._only_one and candidate.tag != self._me.tag and candidate.search > self._since:
            self.elsewhere.add(peer)
        if candidate.bucket != self._me.bucket or peer == self._me.peer_id:
            # It missed the round that led here, and comes once it has replayed that. Without waiting for it, it would
            # always come too late where an epoch takes only ten round trips.
            late = self._only_one and candidate.looking and candidate.tag == self._memory.last_tag != self._me.tag
            if late and self._memory.waits_for(peer):
                self.mates.add(peer)
            return
        later = known is None or candidate.search > known.candidate.search
        if not candidate.looking:
            if known is not None and candidate.search >= known.candidate.search:
                self.finish(peer)
            return
        if known is not None and known.candidate.search == candidate.search:
            known.expires = max(known.expires, now + LIFETIME)
            if direct:
                self._heard(peer)
            return
        outdated = not later or self._memory.has_finished(candidate)
        if (outdated and not direct) or (known is None and len(self.entries) >= MAX_CANDIDATES):
            return
        self.entries[peer] = Entry(candidate, self.rank(candidate), now, now + LIFETIME)
        self._heard(peer)
        self.elsewhere.discard(peer)  # it is back, so its round has failed
        self.settled_at = max(self.settled_at, now + self._quiet)

    def rank(self, candidate: Candidate) -> Rank:
        """The rank of a candidate, see `rank_of`."""
        return rank_of(candidate, self._queue)

    def finish(self, peer: PeerID) -> None:
        """The peer's known search has ended: it is no candidate until it declares a later one."""
        if (entry := self.entries.pop(peer, None)) is not None:
            self._memory.finish(peer, entry.candidate.search)

    def note_elsewhere(self, peer: PeerID, others: Sequence[PeerID], until: float, *, begun: bool) -> None:
        """The group of the leader `peer` and the `others` is full, or has `begun`. They are passed over until `until`
        (loop time); then this peer asks again, since that group may have failed.

        If this peer itself is among the others, the leader was lost before it had told all members: then this peer
        looks for members that have not heard either.
        """
        told = self._me.peer_id not in others
        if told and (begun or not self._only_one):
            # Only known peers count, or a liar could name any.
            known = self.entries.keys() | self._memory.holders.keys()
            self.elsewhere |= {peer, *known.intersection(others)}
        if begun and not self._only_one:
            self.finish(peer)
        self.pass_over([peer, *(others if told else ())], until)

    def outweigh(self, company: Collection[PeerID]) -> bool:
        """Whether at least as many have begun without this peer and its `company`: its followers, and others that look.

        If there is to be one round of a tag, two groups that both begin would make two averages, and separate their
        members for good. So a group that would be no larger than the one that has begun gives up, and its members ask
        the others how that ended. A smaller group elsewhere does not stop this one: its members will have to come here,
        however it ends; and a few peers that only say that they have begun cannot hold up many. Where this peer knows
        the members of the round that led here, only these count: keys cost nothing.
        """
        begun = self.elsewhere.intersection(self._queue) if self._queue else self.elsewhere
        return self._only_one and len(begun.difference(company)) >= 1 + len(company)

    def pass_over(self, peers: Iterable[PeerID], until: float) -> None:
        """Leaves these peers aside until then (loop time), unless they speak or begin another search."""
        for peer in peers:
            self._passed[peer] = max(self._passed.get(peer, 0.0), until)

    def lose(self, peer: PeerID, now: float) -> None:
        """The connection to the peer has ended, or nobody could reach it, or it was silent for too long: it is passed
        over, each further time for twice as long."""
        self.mates.discard(peer)
        self._memory.note_missed([peer])
        failures = self._failures.get(peer, 0)
        self.pass_over([peer], now + 2 * self._options.request_timeout * 2**failures)
        self._failures[peer] = min(failures + 1, MAX_BACKOFF)

    def _heard(self, peer: PeerID) -> None:
        self._passed.pop(peer, None)
        self._failures.pop(peer, None)

    def is_out(self, peer: PeerID, now: float) -> bool:
        """Whether the peer may not be in a group with this one yet."""
        return self.out.get(peer, 0.0) > now

    def present(self, now: float) -> list[Entry]:
        """All candidates that are not passed over at the moment, by rank."""
        there = (
            entry
            for peer, entry in self.entries.items()
            if now < entry.expires and self._passed.get(peer, 0.0) <= now and not self.is_out(peer, now)
        )
        return sorted(there, key=lambda entry: entry.rank)

    def others(self, now: float) -> list[Candidate]:
        """The candidates, and the holders of the bucket that may look again, in whatever group they are now."""
        present = (entry.candidate for entry in self.present(now))
        holders = self._memory.holders.items() if self.awaits_holders else ()
        return [*present, *(each for peer, each in holders if self._memory.waits_for(peer))]

    def missing(self, now: float, *, holders: bool = True) -> set[PeerID]:
        """Peers that could still come, and for which a group stays open: candidates for as long as an answer may take,
        mates, and with `holders` those that hold the bucket, unless only mates are expected."""
        missing, timeout = set(self.mates), self._options.request_timeout
        for entry in self.present(now):
            hoped_for = now < entry.since + timeout / (1 if entry.candidate.dialable else 2)
            if hoped_for and self._memory.waits_for(entry.peer_id):
                missing.add(entry.peer_id)
        if holders:
            missing |= self._idle
        return {peer for peer in missing if not self.is_out(peer, now)}

    @property
    def _idle(self) -> set[PeerID]:
        return self._memory.idle() - self.elsewhere - {self._me.peer_id} if self.awaits_holders else set()

    def conflict(self, since: float, now: float) -> FingerprintError | None:
        """Returns the error of this peer if it is a newcomer, up since swarm time `since`, in a run of other terms: no
        peer that it has asked has its terms, none is left to ask, and those that refused it were here before."""
        elders = [keys for keys, theirs in self.conflicts.values() if theirs < since]
        if not elders or self.agreed or not self._memory.newcomer or self.present(now):
            return None
        keys = mode(elders)
        reason = f"refused by {elders.count(keys)} peers: what must agree differs in {', '.join(keys)}"
        return FingerprintError(reason, keys)
