"""Claims: which reports this peer believes, and by whose word it moves to another lineage.

A claim costs its author nothing, and looking into it costs everyone else a while. So the word of a peer that does not
stand by its report counts for nothing for a while (`averaging/trust.py`), and of the others' words those of mates
count, see `standing.py`, or what `proofs.py` shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from swarmcli.averaging.trust import PeerTrust
from swarmcli.backoff import Backoff
from swarmcli.events import Noticed
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.task_owner import TaskOwner
from swarmcli.optim.peers.directory import PeerDirectory
from swarmcli.optim.peers.proofs import MOST_PROOFS, Saved, Vouching, method_of, step_between
from swarmcli.optim.peers.report import PeerReport
from swarmcli.optim.peers.standing import Mates, PeerWord, Standing
from swarmcli.optim.state.lineage import Claim, LineagePosition, best, lineage_to_follow

if TYPE_CHECKING:
    from swarmcli.averaging.round.certificate import RoundCertificate


DISTRUST = 120.0  # seconds for which a lineage is ignored of which nobody gave out the state
APART = 10.0  # seconds of holding another lineage before it counts as parted: most come back at once
MOST_UNPROVED = 8  # lineages that nobody bears out, of which people are told


class Claims:
    """Judges the reports of a directory, and the answers that a survey has brought. Belongs to the event loop."""

    def __init__(self, directory: PeerDirectory) -> None:
        self.directory, self.trust = directory, PeerTrust.of(directory.endpoint, directory.run_id)
        self.mates = Mates()
        self.vouching = Vouching(directory.endpoint, method_of(directory.run_id), self.mates)
        self._endpoint, self._history = directory.endpoint, directory.history
        self._distrusted = Backoff[bytes](DISTRUST, DISTRUST)  # lineages
        self._told_unproved: set[bytes] = set()  # lineages of which people have been told that nobody vouches for them
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
        """The peers of this run, and with its fingerprint, that hold a state and are believed to."""
        terms = self.directory.describe().terms
        return [
            peer
            for peer, report in self.directory.others.items()
            if report.holds_state and report.terms == terms and self.trusts(bytes.fromhex(report.lineage))
        ]

    def credible(self) -> list[PeerID]:
        """The holders whose word counts at the moment."""
        return [peer for peer in self.holders() if self.trust.believes(peer)]

    def reported(self) -> list[Claim]:
        """The lineages that others hold, by the last reports of those whose word counts."""
        return [self.directory.others[peer].claim for peer in self.credible()]

    def distrust(self, lineage: bytes) -> None:
        """For a while, a peer that claims to hold this lineage is taken for one that holds nothing, and the word of
        those who reported it counts for nothing."""
        others = self.directory.others.items()
        self.trust.disbelieve(peer for peer, report in others if bytes.fromhex(report.lineage) == lineage)
        self._distrusted.add(lineage, loop_time())

    def trusts(self, lineage: bytes) -> bool:
        """Whether this peer takes others' word that they hold this lineage."""
        return not self._distrusted.rests(lineage, loop_time())

    def in_turn(self, peers: Iterable[PeerID]) -> list[PeerID]:
        """Mates first, then one of each network that is connected, then the others, one of each network after the
        other: so whoever floods the run with identities of one network is one of many who are asked, and addresses that
        reports merely name are asked when nobody else is left. Of one network the furthest comes first. A peer that
        pauses, and may have stood still for days, comes last."""
        others = self.directory.others
        reported = filter(others.__contains__, peers)
        ranked = sorted(reported, key=lambda peer: others[peer].claim.position.order, reverse=True)
        known, seen, met = self.mates.known, Counter[Hashable](), set[Hashable]()
        places = {}
        for peer in ranked:
            network = self.directory.network_of(peer)
            first = peer in known or bytes.fromhex(others[peer].lineage) in self.vouching.owners
            here = self._endpoint.is_connected(peer) and network not in met
            places[peer] = (self.directory.is_away(peer), not first, not (first or here), 0 if first else seen[network])
            seen[network] += 1
            met |= {network} if here else set()
        return sorted(ranked, key=places.__getitem__)

    # which lineage to follow

    def leading(self, own: Claim) -> LineagePosition:
        """The lineage that may lead, by the last reports: `own` if none does. A reason to ask, no more.

        A peer that has mates goes by their reports, and what the run's owner signed: strangers' are no reason to leave
        a group. A lineage that leads nobody counts if most mates hold it for a while already.
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
        """The position that this peer should train on, by what others have just answered and by the reports of mates
        that are there and were not asked, or could not be. Where that bears out nobody who claims to lead, a few of
        those are asked for the certificates of their last rounds."""
        directory = self.directory
        mates = [peer for peer in self.credible() if peer in self.mates.known and directory.is_there(peer)]
        told = {peer: PeerWord(directory.others[peer].claim, rests=directory.is_away(peer)) for peer in mates}
        words = {**told, **answers}
        found = self._standing(words).to_follow(own)
        if ahead := [peer for peer, word in answers.items() if word.claim.settled and word.position.beats(found)]:
            await self.vouching.look_into(self.in_turn(ahead), answers)
            found = self._standing(words).to_follow(own)
        self._note_unproved(Claim(found, own.settled), answers)
        return found

    def _standing(self, words: Mapping[PeerID, PeerWord]) -> Standing:
        network, vouching = self.directory.network_of, self.vouching
        return Standing(self.mates, words, network, vouching.signed, vouching.owners, self._history.differs)

    def _note_unproved(self, own: Claim, answers: Mapping[PeerID, PeerWord]) -> None:
        """A peer that claims to lead, and that nobody bears out, counts for nothing for a while; people are told of
        each such lineage once. A newcomer leaves in peace those who say that they come from there."""
        beating = {peer: word for peer, word in answers.items() if word.position.beats(own.position)}
        ahead = {p: word for p, word in beating.items() if word.claim.settled and not word.holds(own.position.lineage)}
        self.trust.disbelieve(beating if own.settled else ahead)
        fresh = {word.position.lineage for word in ahead.values()} - self._told_unproved
        if own.settled and fresh and len(self._told_unproved) < MOST_UNPROVED:
            self._told_unproved |= fresh
            epoch = max(word.position.epoch for word in ahead.values())
            claims = "1 peer claims" if len(ahead) == 1 else f"{len(ahead)} peers claim"
            text = (
                f"{claims} another lineage, of epoch {epoch}, and nobody with whom this peer has trained bears it out: "
                f"it stays at epoch {own.position.epoch}"
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
        """The same by a round of others."""
        before, after = self._history.latest, self.directory.describe().claim.position
        step = None if before is None else step_between(before, after, round_id, certificate)
        if step is not None:
            self.vouching.way.note(step)
        self.directory.note_position()

    def note_taken_over(self, position: LineagePosition, donors: Sequence[PeerID]) -> None:
        """This peer has come to a position by another one's state: what proves it is asked of those who gave it, beside
        all else."""
        self._tasks.spawn(self._take_over_proof(position, donors[:MOST_PROOFS]))

    async def _take_over_proof(self, position: LineagePosition, donors: Sequence[PeerID]) -> None:
        for donor in donors:
            proof = await self.vouching.fetch(donor, position)
            if proof is not None:
                self.vouching.way.take_over(proof)
                return

    def saved(self) -> str:
        """For a checkpoint: this peer's mates, and what proves its position."""
        proof = self.vouching.way.proof(self.directory.describe().claim.position.lineage)
        return Saved(tuple(map(tuple, map(sorted, self.mates.rounds))), proof).plain()

    def restore(self, saved: Saved) -> None:
        """From the checkpoint whose position this peer holds now."""
        for mates in saved.rounds:
            self.mates.note(mates)
        if saved.proof.leads_to(self.directory.describe().claim.position):
            self.vouching.way.take_over(saved.proof)

    # who trains another model

    def _note_look(self) -> None:
        """Remembers since when whose reports tell of another lineage than this peer's at the same epoch."""
        now, before, others = self._endpoint.clock.now(), self._apart_since, self.directory.others
        self._apart_since = {
            peer: before.get(peer, now)
            for peer, report in others.items()
            if report.holds_state and report.claim.settled and self._history.differs(report.claim.position)
        }
        self.vouching.read_owners_words(others.values())

    def apart(self) -> dict[PeerID, PeerReport]:
        """The peers that live and train another model of this run, or wait since they cannot reach this peer's.

        Those who train on are named only after a while: a peer that missed a round usually comes back at once. For any
        thread.
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
        """They lead, and this peer goes on without them: for a while, longer each time, their reports count for
        nothing but the alarm."""
        self._set_apart = set(peers)
        self.trust.disbelieve(self._set_apart)

    def is_led_by(self, report: PeerReport, own: Claim) -> bool:
        """Whether this peer should be on the lineage of a peer that it cannot ask, by the rule for lineages.

        Compared is where this peer stood when the report was made. So of two that part, one goes on and one waits,
        however quickly their epochs pass and however late each reads of the other.
        """
        claim = report.claim
        if not claim.settled or claim.position in self._history:
            return False
        if own.settled and self.mates.known:
            mates = [peer for peer in self.credible() if peer in self.mates.known]
            if 2 * sum(peer in self._apart_since for peer in mates) <= len(mates):
                return False
        then = self._history.at(report.time) or own.position
        return lineage_to_follow(Claim(then, own.settled), [claim]) != then
