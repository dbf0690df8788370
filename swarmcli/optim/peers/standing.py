"""Whose word moves this peer to another lineage.

A claim costs its author nothing, so it counts by who stands behind it. A peer that has made rounds goes by its
*mates*, the members of these rounds: a lineage counts once more of them hold it than hold anything else, of their
networks where these are four or more. A newcomer has no mates: it takes the lineage that most unlike networks hold.

    who claims a lineage       what bears it out                             then
    mates                      more of them hold it than do not, and more    this peer follows the one that leads
                               than a third of its last round
    strangers, to a settled    nothing                                       nobody moves; people are told
    strangers, to a newcomer   contacts in more networks than any other      it takes that one

A mate *holds* a lineage if it says so now, over its own connection, or came through it; or if its signature stands
under the round that led there, and it does not say otherwise now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from swarmcli.network.identity import PeerID
from swarmcli.optim.state.lineage import Claim, LineagePosition, best, lineage_to_follow

MOST_ROUNDS = 16  # with unlike members, whose members are mates
MOST_MATES = 512  # that are kept of one round
LEAST_NETWORKS = 4  # of mates, from which on these count instead of mates, as for votes of a round


@dataclass(frozen=True, slots=True)
class PeerWord:
    """A peer's word about itself.

    trail   the lineages through which it came, as far as it says so, none of them older than some rounds
    recent  it said so just now; otherwise in its last report, which may be some epochs old
    rests   it pauses: it holds what was the run's when it did, and has no say in where the run went since
    """

    claim: Claim
    trail: Collection[bytes] = ()
    recent: bool = True
    rests: bool = False

    @property
    def position(self) -> LineagePosition:
        return self.claim.position

    def holds(self, lineage: bytes) -> bool:
        """Whether it is at this lineage, or beyond it."""
        return lineage == self.position.lineage or lineage in self.trail


@dataclass(frozen=True, slots=True)
class Signed:
    """The signers of the round that led to a lineage, and the lineages on the way there.

    alone   since then a peer has stepped by itself: a signer that can be asked has to say that it holds it
    """

    members: frozenset[PeerID] = frozenset()
    way: frozenset[bytes] = frozenset()
    alone: bool = False


def enough(members: int) -> int:
    """So many of a round cannot all be hostile; of fewer than four none can be."""
    return (members - 1) // 3 + 1 if members >= 4 else 1


class Mates:
    """The members of this peer's own last rounds, without itself. Bounded."""

    def __init__(self) -> None:
        self.rounds: deque[frozenset[PeerID]] = deque(maxlen=MOST_ROUNDS)  # unlike each other, the latest last

    def note(self, members: Iterable[PeerID]) -> None:
        """This peer has committed a round with these; with nobody, if it stepped by itself."""
        mates = frozenset(sorted(members)[:MOST_MATES])
        if mates in self.rounds:
            self.rounds.remove(mates)
        self.rounds.append(mates)

    @property
    def known(self) -> frozenset[PeerID]:
        return frozenset().union(*self.rounds)

    @property
    def needed(self) -> int:
        """How many of them a lineage needs at least: one more than can be hostile in the last round."""
        return enough(1 + len(self.rounds[-1])) if self.rounds else 1

    def __bool__(self) -> bool:
        """Whether this peer has made a round."""
        return bool(self.rounds)


@dataclass(frozen=True)
class Standing:
    """Everything that this peer knows when it decides: its mates, everybody's words, and what was signed.

    network   in which bucket a peer counts where networks are counted
    differs   whether this peer was at the epoch of a position on another lineage
    """

    mates: Mates
    words: Mapping[PeerID, PeerWord]
    network: Callable[[PeerID], Hashable]
    signed: Mapping[bytes, Signed] = field(default_factory=dict)
    proved: Collection[bytes] = ()  # lineages that the run's owner signed
    differs: Callable[[LineagePosition], bool] = lambda _: False

    def to_follow(self, own: Claim) -> LineagePosition:
        """The position that this peer should train on: its own, unless another one counts that leads."""
        leading = self._owners(own)
        if leading is not None:
            return leading
        if not own.settled:
            return self._joined(own)
        if self.mates.known & self.words.keys():
            return self._vouched(own)
        return self._outnumbered(own)

    def _owners(self, own: Claim) -> LineagePosition | None:
        """One that the run's owner signed leads whatever anybody says, if it leads."""
        signed = (word.position for word in self.words.values() if word.position.lineage in self.proved)
        found = best(signed)
        return found if found is not None and found.beats(own.position) else None

    # a settled peer with mates

    def supporters(self, lineage: bytes, among: Collection[PeerID]) -> set[PeerID]:
        """Those of these peers that hold a lineage, by their words or signatures."""
        held = {peer for peer in among if peer in self.words and self.words[peer].holds(lineage)}
        signed = self.signed.get(lineage, Signed())
        return held | {peer for peer in signed.members if peer in among and self._may_hold(peer, signed)}

    def _may_hold(self, peer: PeerID, signed: Signed) -> bool:
        """Whether what a signer says now does not contradict its signature, which may be old."""
        word = self.words.get(peer)
        if word is None or signed.alone:
            return word is None
        return not word.claim.settled or word.position.lineage in signed.way

    def counts(self, position: LineagePosition) -> bool:
        """Whether mates bear a position out: more of them than hold anything else, and enough of the last round."""
        known = self.mates.known
        held = self.supporters(position.lineage, known)
        way = self._way(position.lineage)
        against = {peer for peer in known - held if self._speaks_against(peer, way)}
        least = enough(1 + self._votes(self.mates.rounds[-1]))
        return self._votes(held) >= least and self._votes(held) > self._votes(against)

    def _votes(self, mates: Collection[PeerID]) -> int:
        """Keys cost nothing, so networks count as in rounds, if there are enough of them."""
        several = len({self.network(peer) for peer in self.mates.known}) >= LEAST_NETWORKS
        return len({self.network(peer) for peer in mates}) if several else len(mates)

    def _way(self, lineage: bytes) -> frozenset[bytes]:
        """Through which lineages one came, as signatures prove or its holders say: who is still there is on its way. In
        rounds of fewer than four a few that are ahead cannot be told from one that lies: there nobody is."""
        if len(self.mates.rounds[-1]) < 3:
            return frozenset()
        held = [self.words[peer] for peer in self.mates.known if peer in self.words and self.words[peer].holds(lineage)]
        return self.signed.get(lineage, Signed()).way.union(*(word.trail for word in held))

    def _speaks_against(self, peer: PeerID, way: Collection[bytes]) -> bool:
        """Whether its word counts against it: not while it is on the way there, nor by an old report of this way."""
        word = self.words.get(peer)
        if word is None or not word.claim.settled or word.rests or word.position.lineage in way:
            return False
        return word.recent or self.differs(word.position)

    def _vouched(self, own: Claim) -> LineagePosition:
        claimed = {word.position for word in self.words.values() if word.claim.settled}
        ahead = [each for each in claimed if each.beats(own.position) and self.counts(each)]
        if ahead:
            return best(ahead) or own.position
        # Parted: whoever holds this peer's lineage is in the minority, so those over there never follow it.
        on_own = 1 + self._votes(self.supporters(own.position.lineage, self.mates.known))
        apart = [each for each in claimed if own.position.beats(each) and self.differs(each) and self.counts(each)]
        apart = [each for each in apart if self._votes(self.supporters(each.lineage, self.mates.known)) > on_own]
        return best(apart) or own.position

    # newcomers, and peers that never met anybody

    def _weight(self, lineage: bytes, among: Collection[PeerID]) -> tuple[int, int]:
        """In how many networks a lineage is held, and by how many."""
        held = self.supporters(lineage, among)
        return len({self.network(peer) for peer in held}), len(held)

    def _joined(self, own: Claim) -> LineagePosition:
        """A newcomer goes by everyone; a peer that comes back and meets its mates goes by them."""
        mates = self.mates.known & self.words.keys()
        among = mates if mates and len(mates) >= self.mates.needed else self.words.keys()
        words = [self.words[peer] for peer in among]
        words = [word for word in words if not word.rests] or words
        if settled := {word.position for word in words if word.claim.settled}:
            leading = self._most_held(settled, among)
            return lineage_to_follow(own, [Claim(leading)])
        return self._most_held({own.position, *(word.position for word in words)}, among, own)

    def _most_held(
        self, positions: Collection[LineagePosition], among: Collection[PeerID], own: Claim | None = None
    ) -> LineagePosition:
        """`own`: counts as one more peer that holds its position, in a network of its own."""

        def rank(position: LineagePosition) -> tuple[int, int, tuple[int, int, int]]:
            networks, peers = self._weight(position.lineage, among)
            here = own is not None and own.position == position
            return max(networks, int(here)), peers + here, position.order

        return max(positions, key=rank)

    def _outnumbered(self, own: Claim) -> LineagePosition:
        """A peer that meets none of its mates counts for its own lineage as everybody does for theirs. One that has
        made no round has nothing to lose, and follows those who have gone on from where it stands."""
        everyone = self.words.keys()
        claimed = {word.position for word in self.words.values() if word.claim.settled}
        ahead = [each for each in claimed if each.beats(own.position)]
        ahead = [each for each in ahead if self._weight(each.lineage, everyone) >= self._opposed(each, own)]
        return self._most_held(ahead, everyone) if ahead else own.position

    def _opposed(self, position: LineagePosition, own: Claim) -> tuple[int, int]:
        """The weight of this peer's own lineage against that position: of those who have not gone on there."""
        not_there = {peer: word for peer, word in self.words.items() if not word.holds(position.lineage)}
        here = [peer for peer, word in not_there.items() if word.holds(own.position.lineage)]
        if not self.mates:
            here = [peer for peer in here if self.words[peer].position == own.position]
            trails = [word.trail for word in self.words.values() if word.holds(position.lineage)]
            proved = self.signed.get(position.lineage, Signed()).way
            if any(own.position.lineage in passed for passed in [proved, *trails]):
                return 0, 0
        return max(1, len({self.network(peer) for peer in here})), len(here) + 1
