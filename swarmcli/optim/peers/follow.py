"""Whose word moves this peer to another lineage. Only this file decides that.

A claim costs its author nothing, so it counts by who stands behind it. A peer that has made rounds goes by its *mates*,
the members of these rounds, of their networks where these are four or more. A newcomer has no mates.

    who claims a lineage       what bears it out                                      then
    mates                      more of those who can be asked hold it than do not,    this peer follows the one that
                               and more than a third of its last round                leads
    anybody, to a settled      certificates of its rounds from this peer's last one   the same, unless more mates who
                               on, each signed by more than a third of the round      can be asked hold something else
                               before, see `proof.py`
    strangers, to a settled    nothing else                                           nobody moves; people are told
    strangers, to a newcomer   contacts in more networks than any other               it takes that one

A mate *holds* a lineage if it says so now, over its own connection, or came through it; or if its signature stands
under the round that led there, and it does not say otherwise now.

A report is a reason to ask, no more; and looking into it costs everyone a while. So the word of a peer that does not
stand by its report counts for nothing for a while (`averaging/trust.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarmcli.averaging.trust import PeerTrust
from swarmcli.backoff import Backoff
from swarmcli.events import Noticed
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.task_owner import TaskOwner
from swarmcli.optim.peers.directory import PeerDirectory
from swarmcli.optim.peers.proof import MOST_PROOFS, Mates, Saved, Signed, Vouching, enough, method_of, step_between
from swarmcli.optim.peers.report import PeerReport
from swarmcli.optim.state.lineage import Claim, LineagePosition, best, lineage_to_follow

if TYPE_CHECKING:
    from swarmcli.averaging.certificate import RoundCertificate

LEAST_NETWORKS = 4  # with this many networks of mates, networks count instead of mates, as for the votes of a round
DISTRUST = 120.0  # seconds for which this peer ignores a lineage whose state nobody gave out
APART = 10.0  # seconds on another lineage, after which a peer counts as parted: most come back at once
MOST_UNPROVED = 8  # lineages that nobody bears out: people hear of no more than this many


@dataclass(frozen=True, slots=True)
class PeerWord:
    """A peer's word about itself.

    trail   the lineages through which it says that it came, in its last rounds
    """

    claim: Claim
    trail: Collection[bytes] = ()

    @property
    def position(self) -> LineagePosition:
        return self.claim.position

    def holds(self, lineage: bytes) -> bool:
        """Whether the peer says that it is at this lineage, or came through it."""
        return lineage == self.position.lineage or lineage in self.trail


@dataclass(frozen=True)
class Standing:
    """Everything that this peer knows when it decides: its mates, everybody's words, and what was signed.

    network   peer → the network in which it counts
    signed    lineage → what is signed on the way to it
    owners    lineages that the run's owner has signed
    differs   whether this peer was on another lineage at the epoch of a position
    """

    mates: Mates
    words: Mapping[PeerID, PeerWord]
    network: Callable[[PeerID], Hashable]
    signed: Mapping[bytes, Signed] = field(default_factory=dict)
    owners: Collection[bytes] = ()
    differs: Callable[[LineagePosition], bool] = lambda _: False

    def to_follow(self, own: Claim) -> LineagePosition:
        """The position on which this peer should train: its own, unless one that leads counts.

        One that the run's owner has signed counts whatever others say. A newcomer with mates, which comes back from a
        checkpoint, goes by them if enough of them are there.
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
        # Parted lineages: if more mates hold the other one, they will never follow this peer's.
        on_own = 1 + self._votes(self._holders(own.position.lineage))
        apart = [each for each in claimed if own.position.beats(each) and self.differs(each) and self.counts(each)]
        apart = [each for each in apart if self._votes(self._holders(each.lineage)) > on_own]
        return best(ahead) or best(apart) or own.position

    def counts(self, position: LineagePosition) -> bool:
        """Whether mates bear a position out: more of them hold it than hold anything else, and more than a third of the
        last round."""
        held, signed = self._holders(position.lineage), self.signed.get(position.lineage, Signed())
        # A mate that is still on the way there is not against it. In a smaller round one liar could have signed alone.
        way = signed.way if signed.members and len(self.mates.rounds[-1]) >= 3 else ()
        others = {peer: self.words[peer] for peer in (self.mates.known & self.words.keys()) - held}
        against = [peer for peer, word in others.items() if word.claim.settled and word.position.lineage not in way]
        least = enough(1 + self._votes(self.mates.rounds[-1]))
        return self._votes(held) >= least and self._votes(held) > self._votes(against)

    def _holders(self, lineage: bytes) -> set[PeerID]:
        """The mates that hold a lineage, by their words, or by their signatures if their words do not contradict
        these."""
        signed = self.signed.get(lineage, Signed())

        def holds(peer: PeerID) -> bool:
            word = self.words.get(peer)
            if word is None or word.holds(lineage):
                return word is not None or peer in signed.members
            return peer in signed.members and (not word.claim.settled or word.position.lineage in signed.way)

        return set(filter(holds, self.mates.known))

    def _votes(self, mates: Collection[PeerID]) -> int:
        """The votes of these mates. Keys cost nothing, so networks count as in rounds, if there are enough of them."""
        several = len({self.network(peer) for peer in self.mates.known}) >= LEAST_NETWORKS
        return len({self.network(peer) for peer in mates}) if several else len(mates)

    # newcomers, and peers that meet none of their mates

    def _most_held(self, own: Claim, among: Collection[PeerID]) -> LineagePosition:
        """The position that is held in most networks; of equal ones by most peers; of these the one that leads.

        A newcomer goes by settled peers, if there are any. A settled peer counts itself for its own position, as a
        network of its own. If it has been in no round it has nothing to lose, and follows peers that have gone on from
        its position.
        """
        words = {peer: self.words[peer] for peer in among}

        def rank(position: LineagePosition) -> tuple[int, int, tuple[int, int, int]]:
            mine = position == own.position  # peers that have gone on from there do not count for it
            passed = b"" if mine else position.lineage
            held = [peer for peer, word in words.items() if word.position == position or passed in word.trail]
            return max(len({self.network(peer) for peer in held}), int(mine)), len(held) + mine, position.order

        settled = {word.position for word in words.values() if word.claim.settled}
        if not own.settled:
            if settled:
                return lineage_to_follow(own, [Claim(max(settled, key=rank))])
            return max({own.position, *(word.position for word in words.values())}, key=rank)
        ahead = {each for each in settled if each.beats(own.position)}
        here, signed, said = own.position.lineage, self.signed, {word.position: word.trail for word in words.values()}
        gone_on = {each for each in ahead if here in said[each] or here in signed.get(each.lineage, Signed()).way}
        return max((not self.mates and gone_on) or ahead | {own.position}, key=rank)


class Claims:
    """Judges the reports of a directory, and the answers of a survey. It belongs to the event loop."""

    def __init__(self, directory: PeerDirectory) -> None:
        self.directory, self.trust = directory, PeerTrust.of(directory.endpoint, directory.run_id)
        self.mates = Mates()
        self.vouching = Vouching(directory.endpoint, method_of(directory.run_id), self.mates)
        self._endpoint, self._history = directory.endpoint, directory.history
        self._distrusted = Backoff[bytes](DISTRUST, DISTRUST)  # lineages
        self._told_unproved: set[bytes] = set()  # lineages: people have been told that nobody vouches for them
        self._set_apart: set[PeerID] = set()
        self._apart_since: dict[PeerID, float] = {}  # swarm time since when a peer's reports tell of another lineage
        self._tasks = TaskOwner()
        directory.readers.append(self._note_look)

    async def start(self) -> None:
        """Begins to prove this peer's lineage to others, and starts the directory."""
        self.vouching.start()
        await self.directory.start()

    async def shutdown(self) -> None:
        """Ends both. Idempotent; leaves no task."""
        self.vouching.close()
        await self._tasks.close()
        await self.directory.shutdown()

    # whose reports count

    def holders(self) -> list[PeerID]:
        """The peers with this run's fingerprint that report a state of a lineage which this peer does not distrust."""
        alike = self.directory.alike.items()
        return [p for p, report in alike if report.holds_state and self.trusts(bytes.fromhex(report.lineage))]

    def credible(self) -> list[PeerID]:
        """The holders whose word counts at the moment."""
        return [peer for peer in self.holders() if self.trust.believes(peer)]

    def reported(self) -> list[Claim]:
        """The last claims of peers whose word counts."""
        return [self.directory.others[peer].claim for peer in self.credible()]

    def distrust(self, lineage: bytes) -> None:
        """For a while, a peer that reports this lineage counts as one that holds nothing, and the word of those who
        have reported it counts for nothing."""
        others = self.directory.others.items()
        self.trust.disbelieve(peer for peer, report in others if bytes.fromhex(report.lineage) == lineage)
        self._distrusted.add(lineage, loop_time())

    def trusts(self, lineage: bytes) -> bool:
        """Whether this peer takes others' word that they hold this lineage."""
        return not self._distrusted.rests(lineage, loop_time())

    def in_turn(self, peers: Iterable[PeerID]) -> list[PeerID]:
        """Sorts peers for asking them: mates first, then one connected peer of each network, then the others, the
        networks in turn. So one who floods the run with identities of one network is one of many who are asked, and
        peers at addresses that reports merely name are asked when nobody else is left. Of a network the furthest comes
        first. A peer that has not settled, or pauses and may have stood still for days, comes last."""
        others = self.directory.others
        reported = filter(others.__contains__, peers)
        ranked = sorted(reported, key=lambda peer: others[peer].claim.position.order, reverse=True)
        known, seen, met = self.mates.known, Counter[Hashable](), set[Hashable]()
        places = {}
        for peer in ranked:
            network = self.directory.network_of(peer)
            first = peer in known or bytes.fromhex(others[peer].lineage) in self.vouching.owners
            here = self._endpoint.is_connected(peer) and network not in met
            places[peer] = (
                not others[peer].claim.settled,
                not first,
                not (first or here),
                0 if first else seen[network],
            )
            seen[network] += 1
            met |= {network} if here else set()
        return sorted(ranked, key=places.__getitem__)

    # which lineage to follow

    def leading(self, own: Claim) -> LineagePosition:
        """The position that may lead, by the last reports; `own` if none does. It is a reason to ask, no more.

        A settled peer with mates goes by their reports, and by what the run's owner has signed: strangers' reports are
        no reason to leave a group. A position that does not lead counts if most mates have parted from this peer's.
        """
        claims = {peer: self.directory.others[peer].claim for peer in self.credible()}
        if own.settled and self.mates.known:
            known, now = self.mates.known & claims.keys(), self._endpoint.clock.now()
            parted = [claims[peer].position for peer in known if self._is_parted(peer, now)]
            if 2 * len(parted) > len(known) + 1:
                return best(parted) or own.position
            signed = {peer for peer, claim in claims.items() if claim.position.lineage in self.vouching.owners}
            claims = {peer: claims[peer] for peer in known | signed}
        return lineage_to_follow(own, claims.values())

    def _is_parted(self, peer: PeerID, now: float) -> bool:
        return now - self._apart_since.get(peer, now) >= APART

    async def decide(self, own: Claim, answers: Mapping[PeerID, PeerWord]) -> LineagePosition:
        """The position on which this peer should train, by what others have just answered, and by the reports of mates
        that are there but have not answered. If others still claim to lead, it asks a few of them for the certificates
        of their last rounds."""
        words = {**self._told(), **answers}
        found = self._standing(words).to_follow(own)
        if ahead := [peer for peer, word in answers.items() if word.claim.settled and word.position.beats(found)]:
            await self.vouching.look_into((peer, answers[peer].position) for peer in self.in_turn(ahead))
            found = self._standing(words).to_follow(own)
        self._note_unproved(Claim(found, own.settled), answers)
        return found

    def _told(self) -> dict[PeerID, PeerWord]:
        """Mate that is there → its word, by its report."""
        mates = [peer for peer in self.credible() if peer in self.mates.known and self.directory.is_there(peer)]
        return {peer: PeerWord(self.directory.others[peer].claim) for peer in mates}

    def _standing(self, words: Mapping[PeerID, PeerWord]) -> Standing:
        network, vouching = self.directory.network_of, self.vouching
        return Standing(self.mates, words, network, vouching.signed, vouching.owners, self._history.differs)

    def _note_unproved(self, own: Claim, answers: Mapping[PeerID, PeerWord]) -> None:
        """The word of a peer that claims to lead, and that nobody bears out, counts for nothing for a while; people
        hear of each such lineage once. A newcomer disbelieves nobody who says that it came through the newcomer's
        lineage."""
        beating = {peer: word for peer, word in answers.items() if word.position.beats(own.position)}
        ahead = {p: word for p, word in beating.items() if word.claim.settled and not word.holds(own.position.lineage)}
        self.trust.disbelieve(beating if own.settled else ahead)
        fresh = {word.position.lineage for word in ahead.values()} - self._told_unproved
        if own.settled and fresh and len(self._told_unproved) < MOST_UNPROVED:
            self._told_unproved |= fresh
            epoch = max(word.position.epoch for word in ahead.values())
            claims = "1 peer claims" if len(ahead) == 1 else f"{len(ahead)} peers claim"
            text = (
                f"{claims} another lineage, of epoch {epoch}, and no peer of its rounds confirms it: "
                f"this peer stays at epoch {own.position.epoch}"
            )
            self._endpoint.events.emit(Noticed("warning", text))

    # the way of this peer's own lineage

    def note_round(
        self, members: Iterable[PeerID], round_id: bytes, certificate: RoundCertificate | None = None
    ) -> None:
        """This peer has come one epoch further, by a round with these members, itself among them or not."""
        self.mates.note({*members} - {self._endpoint.peer_id})
        self.note_replayed(round_id, certificate)

    def note_replayed(self, round_id: bytes, certificate: RoundCertificate | None) -> None:
        """This peer has come one epoch further, by a round without it."""
        before, after = self._history.latest, self.directory.describe().claim.position
        step = None if before is None else step_between(before, after, round_id, certificate)
        if step is not None:
            self.vouching.way.note(step)
        self.directory.note_position()

    def note_taken_over(self, position: LineagePosition, donors: Sequence[PeerID]) -> None:
        """This peer has taken over another one's state. In the background it asks the donors for the proof of its
        position."""
        self._tasks.spawn(self._take_over_proof(position, donors[:MOST_PROOFS]))

    async def _take_over_proof(self, position: LineagePosition, donors: Sequence[PeerID]) -> None:
        for donor in donors:
            proof = await self.vouching.fetch(donor, position)
            if proof is not None:
                self.vouching.way.take_over(proof)
                return

    def saved(self) -> str:
        """Returns, for a checkpoint, this peer's mates and the proof of its position."""
        proof = self.vouching.way.proof(self.directory.describe().claim.position.lineage)
        return Saved(tuple(map(tuple, map(sorted, self.mates.rounds))), proof).plain()

    def restore(self, saved: Saved) -> None:
        """Takes mates and proof from the checkpoint whose position this peer has now."""
        for mates in saved.rounds:
            self.mates.note(mates)
        if saved.proof.leads_to(self.directory.describe().claim.position):
            self.vouching.way.take_over(saved.proof)

    # who trains another model

    def _note_look(self) -> None:
        """Remembers which peers report another lineage than this peer had at the same epoch, and since when."""
        now, before, others = self._endpoint.clock.now(), self._apart_since, self.directory.others
        self._apart_since = {
            peer: before.get(peer, now)
            for peer, report in others.items()
            if report.holds_state and report.claim.settled and self._history.differs(report.claim.position)
        }
        self.vouching.read_owners_words(others.values())

    def apart(self) -> dict[PeerID, PeerReport]:
        """The peers that are there and train another model of this run, or are stranded.

        A peer that trains another model is named only after a while: one that missed a round usually comes back at
        once. For any thread.
        """
        now = self._endpoint.clock.now()
        return {
            peer: report
            for peer, report in dict(self.directory.others).items()
            if self.directory.is_there(peer)
            and (
                report.phase == "stranded"
                or self._is_parted(peer, now)
                or (peer in self._set_apart and report.claim.position not in self._history)
            )
        }

    def set_apart(self, peers: Iterable[PeerID]) -> None:
        """These peers lead, and this one goes on without them: for a while, longer each time, their word counts for
        nothing; only `apart` still names them."""
        self._set_apart = set(peers)
        self.trust.disbelieve(self._set_apart)

    def is_led_by(self, peer: PeerID, own: Claim) -> bool:
        """Whether this peer should be on the lineage of a peer that it cannot ask, by that one's report.

        The report is compared with this peer's position at the time of the report. So of two that part, one goes on and
        one waits, however quickly their epochs pass and however late each reads the other's report.
        """
        report = self.directory.others[peer]
        stranger = own.settled and self.mates.known and peer not in self.mates.known
        if stranger or not report.claim.settled or report.claim.position in self._history:
            return False
        then = self._history.at(report.time) or own.position
        words = {**self._told(), peer: PeerWord(report.claim)}
        return self._standing(words).to_follow(Claim(then, own.settled)) != then
