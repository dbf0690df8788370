"""PeerDirectory: what this peer tells the run about itself, and what it knows of the others.

Records under `{run_id}_peers` are seconds old. Where that matters (am I behind? am I alone?) the peers themselves
are asked, by the call `{run_id}.position`.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from swarmcli.backoff import Backoff
from swarmcli.dht.schema import SchemaValidator
from swarmcli.errors import NetworkError, SwarmError
from swarmcli.events import EpochReported, Event, Gone, Noticed, OwnAddressesChanged, PeerDisconnected, PeerSeen
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import set_within
from swarmcli.network.prefix import prefix_of_address
from swarmcli.network.task_owner import TaskOwner
from swarmcli.network.wire.messages import Number
from swarmcli.optim.peers.board import Board
from swarmcli.optim.peers.hearing import Hearing
from swarmcli.optim.peers.proofs import ANSWER_TIMEOUT, MOST_PROOFS, Saved, Vouching, step_between
from swarmcli.optim.peers.report import Pause, PeerKeys, PeerReport, Phase, is_away, is_settled
from swarmcli.optim.peers.standing import Mates, Standing, Word
from swarmcli.optim.state.lineage import (
    LINEAGE_BYTES,
    Claim,
    History,
    LineagePosition,
    best,
    is_count,
    lineage_to_follow,
)

if TYPE_CHECKING:
    from swarmcli.averaging.consensus.certificate import RoundCertificate
    from swarmcli.dht import DHTNode

EXPIRATION = 60.0  # seconds after which the report of a peer that says no more is gone
REFRESH_PERIOD = 3.0  # seconds between two looks at the others' reports
ASKED_AT_ONCE = 16  # one answer usually settles the question
RENEWAL = 10.0  # seconds after which a report that has not changed is said again: whom nobody hears lives by it
MOST_TRAIL = 8  # lineages that a peer says it came through
NEAR = 1  # epoch beyond what most report, which one alone may report: somebody ends each epoch first
MOST_TOLD = 8  # lineages that nobody bears out, of which people are told
APART = 10.0  # seconds for which a peer holds another lineage before people are told: most come back at once
Surroundings = Literal[
    "alone",  # nobody on this lineage can be reached
    "company",  # somebody trains on it
    "followed",  # nobody does yet, but somebody one epoch behind may be about to take in the same round as this peer
    "behind",  # somebody trains on a lineage that beats it
]
_TAKE_PART = ("training", "following")
logger = logging.getLogger(__name__)


class PositionRequest(msgspec.Struct, frozen=True):
    """Which lineage do you hold, and have you decided on it?"""

    comes: bool = False  # the sender is on its way there, and asks for a seat in the group that forms


class PositionReply(msgspec.Struct, frozen=True):
    epoch: Number
    samples: Number
    lineage: bytes
    phase: Phase
    terms: str
    keeps: bool = False
    leaving: bool = False
    trail: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MOST_TRAIL)] = ()  # of its last positions, oldest first
    pause: Pause = ""

    @property
    def stays(self) -> bool:
        """Whether others may leave to this peer what it holds."""
        return self.claim.settled and self.phase != "assisting" and not self.leaving

    @property
    def claim(self) -> Claim:
        return Claim(LineagePosition(self.epoch, self.samples, self.lineage), settled=is_settled(self.phase))

    @property
    def word(self) -> Word:
        return Word(self.claim, self.trail, rests=is_away(self.pause))

    def holds(self, lineage: bytes) -> bool:
        """Whether it says that it is at this lineage, or came through it."""
        return self.word.holds(lineage)


class PeerDirectory:
    """Publishes this peer's report when it changes and every RENEWAL seconds; reads the others' in the background.

    `describe` makes the report. PeerSeen is emitted for every other peer that appears, changes or leaves.
    """

    def __init__(
        self,
        node: DHTNode,
        run_id: str,
        describe: Callable[[], PeerReport],
        keep_seat: Callable[[PeerID], None] = lambda peer: None,
    ) -> None:
        """`keep_seat` is called with a peer that is on its way to this peer's group."""
        self._node = node
        self._keep_seat = keep_seat
        self._endpoint = node.endpoint
        self._describe = describe
        self._method = f"{run_id}.position"
        self._board = Board(node, f"{run_id}_peers", PeerReport, EXPIRATION)
        self._present = False  # the others have been told of this peer
        self._unsubscribe: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()
        self._tasks = TaskOwner()
        self._claims: list[Claim] | None = None  # as of the last look; None: to be told anew
        self._at_work: list[PeerID] | None = None  # as of the last look; None: to be told anew
        # Whose reports count for nothing at the moment. A claim costs its peer nothing, but to look into it costs
        # everyone else a while. An honest peer that could not answer once is heard again after seconds.
        self._doubts = Backoff[PeerID](first=15.0, longest=3600.0, growth=4.0)
        self._distrusted: dict[bytes, float] = {}  # lineage → loop time until which claims to it count for nothing
        self.others: dict[PeerID, PeerReport] = {}  # as of the last look
        self._unread = set[PeerID]()  # of the last round: those whose report has not been read since
        self._missing: dict[PeerID, PeerReport] = {}  # the last of each peer without one, until people are told
        self.out_of_reach: dict[PeerID, PeerReport] = {}  # who lived, but could not be asked, at the last survey
        self.hearing = Hearing(node.endpoint, run_id, lambda: self.others)
        self._history = History()
        self.mates = Mates()
        self.vouching = Vouching(node.endpoint, f"{self._method}.proof", self.mates)
        self._told_unproved: set[bytes] = set()  # lineages of which people have been told that nobody vouches for them
        self._time: Callable[[], float] = float  # the loop's, for threads that have none
        self._set_apart: set[PeerID] = set()
        self._apart_since: dict[PeerID, float] = {}  # loop time since when a peer's reports tell of another lineage
        node.add_validators([SchemaValidator(PeerKeys, prefix=run_id)])

    async def start(self) -> None:
        """Declares this peer first and then looks who else is there: of two that start at once, one sees the other."""
        self._time = asyncio.get_running_loop().time
        self._endpoint.serve(self._method, PositionRequest, self._answer)
        self.vouching.start()
        self._unsubscribe = self._endpoint.events.subscribe(self._on_event)
        self.note_position()
        self._present = True
        await self._publish()
        await self.refresh()
        await self.hearing.start()
        self._tasks.keep(self._endpoint.events, self._keep_publishing, self._keep_reading)

    async def shutdown(self) -> None:
        """Ends the background work and says goodbye, with how the last epoch went. Idempotent."""
        self._endpoint.withdraw(self._method)
        self.vouching.close()
        self._unsubscribe()
        await self.hearing.close()
        await self._tasks.close()
        if self._present:
            self._present = False
            await self._publish("left")

    def announce(self, *, anew: bool = False) -> None:
        """The report has changed: it goes out soon. `anew`: this peer has taken over another lineage."""
        self.note_position(anew=anew)
        self._changed.set()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, OwnAddressesChanged):
            self._changed.set()  # whoever waits for a way to this peer reads of it in its report
        elif isinstance(event, PeerDisconnected) and event.left:
            self.hearing.note_goodbye(PeerID.parse(event.peer))

    async def refresh(self) -> Mapping[PeerID, PeerReport]:
        """Looks who is there now. If the DHT cannot be read, what was known stays."""
        try:
            records = await self._board.refresh()
        except SwarmError as error:
            logger.warning("the peers' reports were not read: %s", error)
            return self.others
        records.pop(self._node.peer_id, None)
        self._unread -= records.keys()
        # Whoever is no member any more has left: nobody can be connected with it, so its silence is no news.
        membership = self._endpoint.membership
        gone = {p for p, r in records.items() if r.phase == "left" or (membership is not None and membership.is_out(p))}
        before, self.others = self.others, {p: r for p, r in records.items() if p not in gone}
        self._claims = self._at_work = None
        for peer, report in self.others.items():
            self._endpoint.learn(peer, tuple(report.addresses))
            if before.get(peer) != report:
                self.hearing.note_report(peer, report)
                self._tell(peer, report, before.get(peer))
        self._missing |= {peer: before[peer] for peer in before.keys() - self.others.keys()}
        self._tell_of_missing(records)
        self._note_lineages()
        self.vouching.read_owners_words(self.others.values())
        return self.others

    def _tell(self, peer: PeerID, report: PeerReport, before: PeerReport | None, gone: Gone = "") -> None:
        """Emits what this report says and the one before did not."""
        known = before.recent if before is not None else []
        for ended in report.recent if report.role == "trainer" else ():
            if ended not in known:
                self._endpoint.events.emit(
                    EpochReported(peer.text, ended.epoch, ended.loss, ended.samples, report.samples_per_second)
                )
        self._endpoint.events.emit(_seen(peer, report, gone))

    def _tell_of_missing(self, records: Mapping[PeerID, PeerReport]) -> None:
        """Who said goodbye has left. Whose report expired is lost, unless a process of it is connected: that one was
        started anew, and reports once it has loaded its model."""
        for peer, last in list(self._missing.items()):
            if peer not in records and self._endpoint.is_connected(peer):
                continue
            del self._missing[peer]
            if peer not in records:
                self._tell(peer, last, last, "lost")
            elif peer not in self.others:
                self._tell(peer, records[peer], last, "left")

    def claims(self) -> list[Claim]:
        """The lineages that others hold, by their last reports; those that are in doubt are left out."""
        if self._claims is None:
            self._claims = [self.others[peer].claim for peer in self._credible(self.holders())]
        return self._claims

    def count_present(self) -> int:
        """How many others hold a state, are not in doubt, and have not paused."""
        return sum(not self.is_away(peer) for peer in self._credible(self.holders()))

    def leading(self, own: Claim) -> LineagePosition:
        """The lineage that may lead, by the last reports: `own` if none does. A reason to ask, no more.

        Whoever has mates goes by their reports: strangers' are no reason to leave a group.
        """
        peers = self._credible(self.holders())
        if own.settled and self.mates.known:
            claims = (self.others[peer].claim for peer in peers)
            signed = [claim for claim in claims if claim.position.lineage in self.vouching.owners]
            if (led := lineage_to_follow(own, signed)) != own.position:
                return led
            peers = [peer for peer in peers if peer in self.mates.known]
            if parted := self._parted(own, peers):
                return parted
        return lineage_to_follow(own, [self.others[peer].claim for peer in peers])

    def _parted(self, own: Claim, mates: Sequence[PeerID]) -> LineagePosition | None:
        """A lineage that beats nobody's, but that most mates hold for a while already while this peer holds another."""
        now = asyncio.get_running_loop().time()
        apart = [peer for peer in mates if now - self._apart_since.get(peer, now) >= APART]
        if 2 * len(apart) <= len(mates) + 1:
            return None
        return best(self.others[peer].claim.position for peer in apart)

    async def decide(self, own: Claim, answers: Mapping[PeerID, Word]) -> LineagePosition:
        """The position that this peer should train on, by what others have just answered and by the reports of mates
        that live and were not asked, or could not be. Where that bears out nobody who claims to lead, a few of those
        are asked for the certificates of their last rounds."""
        silent = [peer for peer in self._credible(self.holders()) if peer in self.mates.known and peer not in answers]
        told = {
            peer: Word(self.others[peer].claim, recent=False, rests=self.is_away(peer))
            for peer in silent
            if self.hearing.answers(peer)
        }
        words = {**told, **answers}
        found = self._standing(words).to_follow(own)
        if ahead := [peer for peer, word in answers.items() if word.claim.settled and word.position.beats(found)]:
            await self.vouching.look_into(self.in_turn(ahead), answers)
            found = self._standing(words).to_follow(own)
        self._note_unproved(Claim(found, own.settled), answers)
        return found

    def _standing(self, words: Mapping[PeerID, Word]) -> Standing:
        vouching = self.vouching
        return Standing(self.mates, words, self.network_of, vouching.signed, vouching.owners, self._history.differs)

    def _note_unproved(self, own: Claim, answers: Mapping[PeerID, Word]) -> None:
        """Who claims to lead, and whom nobody bears out, counts for nothing for a while; people are told of each such
        lineage once. A newcomer leaves in peace who says that it comes from there."""
        ahead = {
            peer: word
            for peer, word in answers.items()
            if word.claim.settled and word.position.beats(own.position) and not word.holds(own.position.lineage)
        }
        self.doubt(ahead if not own.settled else [p for p, w in answers.items() if w.position.beats(own.position)])
        fresh = {word.position.lineage for word in ahead.values()} - self._told_unproved
        if own.settled and fresh and len(self._told_unproved) < MOST_TOLD:
            self._told_unproved |= fresh
            epoch = max(word.position.epoch for word in ahead.values())
            claims = "1 peer claims" if len(ahead) == 1 else f"{len(ahead)} peers claim"
            text = (
                f"{claims} another lineage, of epoch {epoch}, and nobody with whom this peer has trained bears it out: "
                f"it stays at epoch {own.position.epoch}"
            )
            self._endpoint.events.emit(Noticed("warning", text))

    def note_round(
        self, members: Iterable[PeerID], round_id: bytes, certificate: RoundCertificate | None = None
    ) -> None:
        """This peer has come one epoch further, by a round with these members, itself among them or not."""
        mates = {*members} - {self._node.peer_id}
        self.mates.note(mates)
        self._unread = mates - self.others.keys()
        self.note_replayed(round_id, certificate)

    def note_replayed(self, round_id: bytes, certificate: RoundCertificate | None) -> None:
        """The same by a round of others."""
        before, after = self._history.latest, self._describe().claim.position
        step = None if before is None else step_between(before, after, round_id, certificate)
        if step is not None:
            self.vouching.way.note(step)
        self.note_position()

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

    def saved(self) -> dict[str, Any]:
        """For a checkpoint: this peer's mates, and what proves its position."""
        proof = self.vouching.way.proof(self._describe().claim.position.lineage)
        return Saved(tuple(map(tuple, map(sorted, self.mates.rounds))), proof).plain()

    def restore(self, saved: Saved) -> None:
        """From the checkpoint whose position this peer holds now."""
        for mates in saved.rounds:
            self.mates.note(mates)
        if saved.proof.leads_to(self._describe().claim.position):
            self.vouching.way.take_over(saved.proof)

    def network_of(self, peer: PeerID) -> Hashable:
        """The bucket in which it counts; of a peer that is not connected the one that it names, unproved."""
        found = self._endpoint.prefix(peer)
        if found is None and (report := self.others.get(peer)) is not None and report.addresses:
            return prefix_of_address(report.addresses[0])
        return found

    def latest_epoch(self) -> int:
        """The furthest that is borne out by reports: of mates if there are any, otherwise of everyone; one alone may be
        an epoch ahead of the rest. What progress reports say beyond it leads nobody on."""
        own = self._describe().epoch
        reported = [self.others[peer] for peer in self._credible(self.holders())]
        mates = [self.others[peer] for peer in self.mates.known if peer in self.others]
        epochs = [report.epoch for report in mates or reported if is_settled(report.phase) and not report.pause]
        if not epochs:
            return own
        usual = statistics.median_high([own, *epochs]) if self.mates else statistics.median_high(epochs)
        return max(own, min(max(epochs), usual + NEAR))

    def at_work(self) -> list[PeerID]:
        """Those who take part in rounds of this run, by their last reports; also those who are about to."""
        if self._at_work is None:  # asked in every step
            terms = self._describe().terms
            alike = ((peer, report) for peer, report in self.others.items() if report.terms == terms)
            self._at_work = [p for p, report in alike if report.phase != "lingering" and not is_away(report.pause)]
        return self._at_work

    async def look_for_work(self, company: Sequence[PeerID], position: LineagePosition) -> tuple[bool, bool]:
        """By what peers say right now: whether anybody takes part in rounds, and whether one of `company` does at
        `position`. Who lives and does not answer counts by its report."""
        reported = [peer for peer in self.at_work() if peer not in company and self.others[peer].phase in _TAKE_PART]
        asked = [*company, *self.in_turn(reported)][:ASKED_AT_ONCE]
        answers = await self.ask(asked)
        at_work = {peer: word for peer, word in answers.items() if word.phase in _TAKE_PART and not is_away(word.pause)}
        if any(word.claim.position.beats(position) for word in at_work.values()):
            await self.refresh()  # what mates report tells whether to follow them
        silent = (peer for peer in reported if peer not in answers)
        with_us = any(peer in at_work and at_work[peer].lineage == position.lineage for peer in company)
        return bool(at_work) or any(map(self.hearing.answers, silent)), with_us

    def anyone_computes(self, members: Iterable[PeerID]) -> bool:
        """Whether a trainer is there that answers; by the reports, which are read every few seconds, or because one of
        the `members` of this peer's group, which forms at once, or one of its last round is somebody without a report
        so far."""
        trainers = [peer for peer in self.at_work() if self.others[peer].role == "trainer"]
        at_it = (peer for peer in trainers if self.others[peer].phase != "stranded" and not self.others[peer].pause)
        last = filter(self._endpoint.is_connected, self._unread)
        return any(self.hearing.answers(peer) for peer in at_it) or any(
            peer not in self.others and peer != self._node.peer_id for peer in (*members, *last)
        )

    def trainers(self) -> dict[PeerID, float]:
        """Those who take part in rounds, with the samples per second that each says to compute."""
        at_work = ((peer, self.others[peer]) for peer in self.at_work())
        return {peer: r.samples_per_second for peer, r in at_work if r.role == "trainer" and not r.pause}

    def is_away(self, peer: PeerID) -> bool:
        """Whether it takes part in no round at present, by its last report."""
        report = self.others.get(peer)
        return report is not None and is_away(report.pause)

    async def ask(self, peers: Iterable[PeerID], *, comes: bool = False) -> dict[PeerID, PositionReply]:
        """What these peers say right now; who does not answer is missing. `comes`: they keep a seat for this peer."""
        asked = list(peers)
        answers = await asyncio.gather(*(self._ask(peer, comes) for peer in asked))
        return {peer: answer for peer, answer in zip(asked, answers, strict=True) if answer is not None}

    async def find(
        self, peers: Iterable[PeerID], fits: Callable[[PositionReply], bool]
    ) -> tuple[PeerID, PositionReply] | None:
        """Whoever answers first of those that fit; None if none of them does within the time that an answer may take.

        Only the first few are asked, all at once: of those who are gone none holds up the answer of another.
        """
        asked = {asyncio.ensure_future(self._ask(peer)): peer for peer in list(peers)[:ASKED_AT_ONCE]}
        waiting = set(asked)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    answer = each.result()
                    if answer is not None and fits(answer):
                        return asked[each], answer
            return None
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def survey(self, *, comes: bool = False) -> dict[PeerID, Word]:
        """Asks who holds the run's states, a few at a time, until some of them answer.

        So records of peers that are gone, and claims that nobody stands by, count for nothing. Whoever reported more
        than it now says is not asked for a while, unless nobody else is left. Where nobody answers who has settled,
        `out_of_reach` are those who live all the same. `comes`: see `ask`.
        """
        await self.refresh()
        self.out_of_reach = {}
        holders = self.in_turn(self._credible(self.holders()) or self.holders())
        claimed = {peer: self.others[peer].claim.position for peer in holders}
        for begin in range(0, len(holders), ASKED_AT_ONCE):
            asked = holders[begin : begin + ASKED_AT_ONCE]
            answers = {peer: answer.word for peer, answer in (await self.ask(asked, comes=comes)).items()}
            self._claims = None
            if not any(word.claim.settled for word in answers.values()):
                living = await self.hearing.find_living(peer for peer in asked if peer not in answers)
                self.out_of_reach = {peer: self.others[peer] for peer in living if peer in self.others}
            for peer in asked:
                answered = peer in answers and not claimed[peer].beats(answers[peer].position)
                if not answered and peer not in self.out_of_reach:
                    self._doubts.add(peer, asyncio.get_running_loop().time())
            if answers:
                return answers
        return {}

    def in_turn(self, peers: Iterable[PeerID]) -> list[PeerID]:
        """Mates first, then one of each network that is connected, then the others, one of each network after the
        other: so whoever floods the run with identities of one network is one of many who are asked, and addresses that
        reports merely name are asked when nobody else is left. Of one network the furthest comes first. Who pauses, and
        may have stood still for days, comes last."""
        reported = (peer for peer in peers if peer in self.others)
        ranked = sorted(reported, key=lambda peer: self.others[peer].claim.position.order, reverse=True)
        known, seen, met = self.mates.known, Counter[Hashable](), set[Hashable]()
        places = {}
        for peer in ranked:
            network = self.network_of(peer)
            first = peer in known or bytes.fromhex(self.others[peer].lineage) in self.vouching.owners
            here = self._endpoint.is_connected(peer) and network not in met
            places[peer] = (self.is_away(peer), not first, not (first or here), 0 if first else seen[network])
            seen[network] += 1
            met |= {network} if here else set()
        return sorted(ranked, key=places.__getitem__)

    async def surroundings(self, position: LineagePosition) -> Surroundings:
        """Who is there for a peer at `position` to average with.

        What matters is where a peer stands now: its report may be some epochs old.
        """
        reports = {peer: self.others[peer] for peer in self.holders() if self._endpoint.is_connected(peer)}
        if _judge(position, [(r.claim, r.phase, r.pause) for r in reports.values()]) == "company":
            return "company"
        await self.refresh()
        asked = self.by_convenience(self.holders())[:ASKED_AT_ONCE]
        answers = await self.ask(asked)
        leading = await self.decide(Claim(position), {peer: answer.word for peer, answer in answers.items()})
        if leading.beats(position):
            return "behind"
        judged = _judge(position, [(answer.claim, answer.phase, answer.pause) for answer in answers.values()])
        if judged == "alone":
            # Two peers that cannot dial each other meet at somebody whom both can, an auxiliary for example, who
            # needs a moment to find their lineage.
            mates = [p for p in asked if p not in answers and self.others[p].claim.position.lineage == position.lineage]
            mates = [peer for peer in mates if not self.is_away(peer)]
            return "followed" if await self.hearing.find_living(mates) else "alone"
        return judged

    def leads_out_of_reach(self, own: Claim) -> dict[PeerID, PeerReport]:
        """Of those who live but could not be asked: who holds a lineage that this peer should be on by the rule.

        Compared is where this peer stood when the report was made. So of two that part, one goes on and one waits,
        however quickly their epochs pass and however late each reads of the other.
        """
        return {peer: report for peer, report in self.out_of_reach.items() if self._is_led_by(report, own)}

    def lives_for_certain(self, peer: PeerID, seconds: float) -> bool:
        """Whether it is heard of, or has renewed its report within the last so many seconds."""
        report = self.others.get(peer)
        renewed = report is not None and self._endpoint.clock.now() - report.time < seconds
        return self.hearing.is_certain(peer) or renewed

    def may_be_led_out_of_reach(self) -> bool:
        """Whether, by the last reports, somebody leads who holds another lineage and cannot be called by this peer."""
        if not self._apart_since:
            return False
        own = self._describe().claim
        return any(
            peer in self._apart_since
            and not self._endpoint.can_reach(peer)
            and self.hearing.answers(peer)
            and self._is_led_by(self.others[peer], own)
            for peer in self._credible(self.holders())
        )

    def _is_led_by(self, report: PeerReport, own: Claim) -> bool:
        claim = report.claim
        if not claim.settled or claim.position in self._history:
            return False
        if own.settled and self.mates.known and not self._most_mates_are_apart():
            return False
        then = self._history.at(report.time) or own.position
        return lineage_to_follow(Claim(then, own.settled), [claim]) != then

    def _most_mates_are_apart(self) -> bool:
        reported = [peer for peer in self._credible(self.holders()) if peer in self.mates.known]
        return 2 * sum(peer in self._apart_since for peer in reported) > len(reported)

    def set_apart(self, peers: Iterable[PeerID]) -> None:
        """They lead, and this peer goes on without them: for a while, longer each time, their reports count for
        nothing but the alarm."""
        self._set_apart = set(peers)
        self.doubt(self._set_apart)

    def apart(self) -> dict[PeerID, PeerReport]:
        """Who lives and trains another model of this run than this peer, or waits since it cannot reach this one's.

        Of those who train on, only after a while: who has missed a round usually comes back at once. For any thread.
        """
        now, since = self._time(), self._apart_since
        return {
            peer: report
            for peer, report in dict(self.others).items()
            if self.hearing.answers(peer)
            and (
                report.phase == "stranded"
                or now - since.get(peer, now) >= APART
                or (peer in self._set_apart and report.claim.position not in self._history)
            )
        }

    async def anyone_behind(self, epoch: int) -> bool:
        """Whether a peer that holds a state, does not pause and can be reached has not come to this epoch yet."""
        await self.refresh()
        behind = [peer for peer in self.holders() if self.others[peer].epoch < epoch and not self.is_away(peer)]
        answers = await self.ask(behind[:ASKED_AT_ONCE])
        return any(answer.epoch < epoch for answer in answers.values())

    def distrust(self, lineage: bytes, seconds: float) -> None:
        """For so long, whoever claims to hold this lineage is taken for a peer that holds nothing; who reported to
        hold it is in doubt."""
        now = asyncio.get_running_loop().time()
        for peer, report in self.others.items():
            if bytes.fromhex(report.lineage) == lineage:
                self._doubts.add(peer, now)
        self._distrusted = {each: until for each, until in self._distrusted.items() if until > now}
        self._distrusted[lineage] = now + seconds
        self._claims = None

    def doubt(self, peers: Iterable[PeerID]) -> None:
        """They did not stand by what they reported: for a while, longer each time, it counts for nothing."""
        now = asyncio.get_running_loop().time()
        for peer in peers:
            self._doubts.add(peer, now)

    def by_convenience(self, peers: Iterable[PeerID]) -> list[PeerID]:
        """In the order in which they are best asked for a state: first those to whom no relay is needed, near ones, and
        those with time to answer; last those who pause."""

        def cost(peer: PeerID) -> tuple[bool, bool, bool, bool, float]:
            report, round_trip = self.others.get(peer), self._endpoint.round_trip(peer)
            busy = report is None or report.phase == "training"
            apart = not self._endpoint.is_connected(peer)
            far = round_trip if round_trip is not None else 1.0
            return self.is_away(peer), self.is_relayed(peer), apart, busy, far

        return sorted(peers, key=cost)

    def is_relayed(self, peer: PeerID) -> bool:
        """Whether what it sends here goes over a relay, as far as this peer knows."""
        seen, report = self._endpoint.seen(peer), self.others.get(peer)
        return seen.relayed if seen is not None else report is not None and report.client_mode

    def note_position(self, *, anew: bool = False) -> None:
        self._history.note(self._describe().claim.position, self._endpoint.clock.now(), anew=anew)

    def _note_lineages(self) -> None:
        """Since when whose reports tell of another lineage than this peer's at the same epoch."""
        now, before = asyncio.get_running_loop().time(), self._apart_since
        self._apart_since = {
            peer: before.get(peer, now)
            for peer, report in self.others.items()
            if report.holds_state and report.claim.settled and self._history.differs(report.claim.position)
        }

    def holders(self) -> list[PeerID]:
        """The peers of this run, and with its fingerprint, that hold a state and are believed to."""
        terms = self._describe().terms
        return [
            peer
            for peer, report in self.others.items()
            if report.holds_state and report.terms == terms and self._trusts(bytes.fromhex(report.lineage))
        ]

    def _credible(self, peers: Iterable[PeerID]) -> list[PeerID]:
        now = asyncio.get_running_loop().time()
        return [peer for peer in peers if not self._doubts.rests(peer, now)]

    def _trusts(self, lineage: bytes) -> bool:
        return self._distrusted.get(lineage, 0.0) <= asyncio.get_running_loop().time()

    async def _ask(self, peer: PeerID, comes: bool = False) -> PositionReply | None:
        try:
            reply = await self._endpoint.call(
                peer, self._method, PositionRequest(comes), PositionReply, timeout=ANSWER_TIMEOUT
            )
        except NetworkError as error:
            logger.debug("%s did not say where it stands: %s", peer.short, error)
            return None
        hashes = [reply.lineage, *reply.trail]
        malformed = any(len(each) != LINEAGE_BYTES for each in hashes) or not is_count(reply.epoch, reply.samples)
        if malformed or reply.terms != self._describe().terms or not self._trusts(reply.lineage):
            return None
        return reply

    async def _answer(self, peer: PeerID, request: PositionRequest) -> PositionReply:
        report = self._describe()
        if request.comes:
            self._keep_seat(peer)
        return PositionReply(
            report.epoch,
            report.samples_seen,
            bytes.fromhex(report.lineage),
            report.phase,
            report.terms,
            report.keeps,
            report.leaving,
            self._history.trail(report.claim.position, MOST_TRAIL),
            report.pause,
        )

    async def _publish(self, phase: Literal["left"] | None = None) -> None:
        self._changed.clear()
        report = self._describe()
        try:
            await self._board.publish(report if phase is None else report.model_copy(update={"phase": phase}))
        except SwarmError as error:
            logger.warning("this peer's report was not stored: %s", error)

    async def _keep_publishing(self) -> None:
        await set_within(self._changed, RENEWAL)
        await self._publish()

    async def _keep_reading(self) -> None:
        await asyncio.sleep(REFRESH_PERIOD)
        await self.refresh()


def _judge(position: LineagePosition, others: Sequence[tuple[Claim, Phase, Pause]]) -> Surroundings:
    # Whoever has not settled yet may take its time with that, or end up elsewhere. Whoever pauses comes to no round;
    # whoever returns from a pause is about to.
    at_work = [claim.position for claim, phase, pause in others if phase in _TAKE_PART and pause != "paused"]
    if any(each.lineage == position.lineage for each in at_work):
        return "company"
    return "followed" if any(each.epoch == position.epoch - 1 for each in at_work) else "alone"


def _seen(peer: PeerID, report: PeerReport, gone: Gone = "") -> PeerSeen:
    return PeerSeen(
        peer=peer.text,
        name=report.name,
        role=report.role,
        epoch=report.epoch,
        samples=report.samples,
        samples_per_second=report.samples_per_second,
        client_mode=report.client_mode,
        gone=gone,
    )
