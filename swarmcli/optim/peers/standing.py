"""Whose word moves this peer to another lineage.

A claim costs its author nothing, so it counts by who stands behind it. A peer that has made rounds goes by its *mates*,
the members of these rounds, of their networks where these are four or more. A newcomer has no mates.

    who claims a lineage       what bears it out                                      then
    mates                      more of those who can be asked hold it than do not,    this peer follows the one that
                               and more than a third of its last round                leads
    anybody, to a settled      certificates of its rounds from this peer's last one   the same, unless more mates who
                               on, each signed by more than a third of the round      can be asked hold something else
                               before, see `proofs.py`
    strangers, to a settled    nothing else                                           nobody moves; people are told
    strangers, to a newcomer   contacts in more networks than any other               it takes that one

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
    rests   it pauses: it holds what was the run's when it did, and has no say in where the run went since
    """

    claim: Claim
    trail: Collection[bytes] = ()
    rests: bool = False

    @property
    def position(self) -> LineagePosition:
        return self.claim.position

    @property
    def has_say(self) -> bool:
        """Whether it trains on what it holds."""
        return self.claim.settled and not self.rests

    def holds(self, lineage: bytes) -> bool:
        """Whether it is at this lineage, or beyond it."""
        return lineage == self.position.lineage or lineage in self.trail


@dataclass(frozen=True, slots=True)
class Signed:
    """The signers of the rounds that led to a lineage, and the lineages on the way there.

    alone   the last step was made by one peer: whoever is still on the way may not come along
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
    owners: Collection[bytes] = ()  # lineages that the run's owner signed
    differs: Callable[[LineagePosition], bool] = lambda _: False

    def to_follow(self, own: Claim) -> LineagePosition:
        """The position that this peer should train on: its own, unless another one counts that leads.

        One that the run's owner signed leads whatever anybody says. A newcomer with mates, which comes back from a
        checkpoint, goes by them if enough are there.
        """
        owners = best(word.position for word in self.words.values() if word.position.lineage in self.owners)
        if owners is not None and owners.beats(own.position):
            return owners
        mates = self.mates.known & self.words.keys()
        if own.settled and mates:
            return self._vouched(own)
        return self._most_held(own, mates if len(mates) >= self.mates.needed else self.words.keys())

    # a settled peer with mates

    def _vouched(self, own: Claim) -> LineagePosition:
        claimed = {word.position for word in self.words.values() if word.claim.settled}
        ahead = [each for each in claimed if each.beats(own.position) and self.counts(each)]
        # Parted: whoever holds this peer's lineage is in the minority, so those over there never follow it.
        on_own = 1 + self._votes(self._holders(own.position.lineage))
        apart = [each for each in claimed if own.position.beats(each) and self.differs(each) and self.counts(each)]
        apart = [each for each in apart if self._votes(self._holders(each.lineage)) > on_own]
        return best(ahead) or best(apart) or own.position

    def counts(self, position: LineagePosition) -> bool:
        """Whether mates bear a position out: more of them than hold anything else, and enough of the last round."""
        held, signed = self._holders(position.lineage), self.signed.get(position.lineage, Signed())
        # Whoever is still on the way there is not against it. Of fewer than four, one that lies could be all who sign.
        way = signed.way if signed.members and not signed.alone and len(self.mates.rounds[-1]) >= 3 else ()
        others = {peer: self.words[peer] for peer in (self.mates.known & self.words.keys()) - held}
        against = [peer for peer, word in others.items() if word.has_say and word.position.lineage not in way]
        least = enough(1 + self._votes(self.mates.rounds[-1]))
        return self._votes(held) >= least and self._votes(held) > self._votes(against)

    def _holders(self, lineage: bytes) -> set[PeerID]:
        """The mates that hold a lineage, by their words or, where these do not contradict them, their signatures."""
        signed = self.signed.get(lineage, Signed())

        def holds(peer: PeerID) -> bool:
            word = self.words.get(peer)
            if word is None or word.holds(lineage):
                return word is not None or peer in signed.members
            on_the_way = not signed.alone and (not word.claim.settled or word.position.lineage in signed.way)
            return peer in signed.members and on_the_way

        return set(filter(holds, self.mates.known))

    def _votes(self, mates: Collection[PeerID]) -> int:
        """Keys cost nothing, so networks count as in rounds, if there are enough of them."""
        several = len({self.network(peer) for peer in self.mates.known}) >= LEAST_NETWORKS
        return len({self.network(peer) for peer in mates}) if several else len(mates)

    # newcomers, and peers that meet none of their mates

    def _most_held(self, own: Claim, among: Collection[PeerID]) -> LineagePosition:
        """The position that is held in most networks, then by most peers, then the one that leads.

        A newcomer yields to whoever has settled. A settled peer counts for where it stands, in a network of its own. If
        it has made no round it has nothing to lose, and follows those who have gone on from where it stands.
        """
        words = {peer: self.words[peer] for peer in among}
        active = {peer: word for peer, word in words.items() if not word.rests} or words

        def rank(position: LineagePosition) -> tuple[int, int, tuple[int, int, int]]:
            mine = position == own.position  # those that have gone on from there hold it no more
            passed = b"" if mine else position.lineage
            held = [peer for peer, word in active.items() if word.position == position or passed in word.trail]
            return max(len({self.network(peer) for peer in held}), int(mine)), len(held) + mine, position.order

        settled = {word.position for word in active.values() if word.claim.settled}
        if not own.settled:
            if settled:
                return lineage_to_follow(own, [Claim(max(settled, key=rank))])
            return max({own.position, *(word.position for word in active.values())}, key=rank)
        ahead = {each for each in settled if each.beats(own.position)}
        here, signed, said = own.position.lineage, self.signed, {word.position: word.trail for word in active.values()}
        gone_on = {each for each in ahead if here in said[each] or here in signed.get(each.lineage, Signed()).way}
        return max((not self.mates and gone_on) or ahead | {own.position}, key=rank)
