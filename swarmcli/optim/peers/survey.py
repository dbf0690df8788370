"""Survey: asks peers where they stand, by the call `{run_id}.position`, and answers it.

Reports are seconds old. Where that matters (am I behind? am I alone?) the peers themselves are asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Annotated, Literal

import msgspec

from swarmcli.errors import NetworkError
from swarmcli.network.identity import PeerID
from swarmcli.network.wire.messages import Number
from swarmcli.optim.peers.follow import Claims, PeerWord
from swarmcli.optim.peers.proof import ANSWER_TIMEOUT
from swarmcli.optim.peers.report import Pause, PeerReport, Phase, is_away, is_settled
from swarmcli.optim.state.lineage import LINEAGE_BYTES, Claim, LineagePosition, is_count

MOST_TRAIL = 8  # lineages that a peer says it came through
ASKED_AT_ONCE = 16  # peers: one answer usually settles the question
Surroundings = Literal[
    "alone",  # nobody on this lineage can be reached
    "company",  # somebody trains on it
    "followed",  # nobody does yet, but somebody may be about to: it is one epoch behind, or starts as this peer does
    "behind",  # somebody trains on a lineage that beats it
]
_TAKE_PART = ("training", "following")
logger = logging.getLogger(__name__)


class PositionRequest(msgspec.Struct, frozen=True):
    """Which lineage do you hold, and have you decided on it?"""


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
        settled = is_settled(self.phase) and not is_away(self.pause)
        return Claim(LineagePosition(self.epoch, self.samples, self.lineage), settled)

    @property
    def word(self) -> PeerWord:
        return PeerWord(self.claim, self.trail)


class Survey:
    """Asks the peers of a directory, in an order that floods of claims cannot turn."""

    def __init__(self, claims: Claims) -> None:
        self.claims, self.directory = claims, claims.directory
        self.out_of_reach: dict[PeerID, PeerReport] = {}  # peers that lived, but could not be asked, at the last survey
        self._endpoint = self.directory.endpoint
        self._method = f"{self.directory.run_id}.position"

    async def start(self) -> None:
        """Begins to say where this peer stands, and starts the claims and the directory."""
        self._endpoint.serve(self._method, PositionRequest, self._answer)
        await self.claims.start()

    async def shutdown(self) -> None:
        """Ends all three, and says goodbye. Idempotent; leaves no task."""
        self._endpoint.withdraw(self._method)
        await self.claims.shutdown()

    async def ask(self, peers: Iterable[PeerID]) -> dict[PeerID, PositionReply]:
        """Asks these peers where they stand; silent ones are missing."""
        asked = list(peers)
        answers = await asyncio.gather(*map(self._ask, asked))
        return {peer: answer for peer, answer in zip(asked, answers, strict=True) if answer is not None}

    async def find(
        self, peers: Iterable[PeerID], fits: Callable[[PositionReply], bool]
    ) -> tuple[PeerID, PositionReply] | None:
        """Asks the first few of these peers; returns the first of them whose answer fits, and that."""
        answers = await self.ask(list(peers)[:ASKED_AT_ONCE])
        return next(((peer, answer) for peer, answer in answers.items() if fits(answer)), None)

    async def survey(self) -> dict[PeerID, PeerWord]:
        """Asks who holds the run's states, a few at a time, until some of them answer.

        So records of peers that are gone, and claims that nobody stands by, count for nothing. A peer that reported
        more than it now says is not asked for a while, unless nobody else is left. Where nobody answers who has
        settled, `out_of_reach` are those who live all the same.
        """
        claims, others = self.claims, await self.directory.refresh()
        self.out_of_reach = {}
        holders = claims.in_turn(claims.credible() or claims.holders())
        claimed = {peer: others[peer].claim.position for peer in holders}
        for begin in range(0, len(holders), ASKED_AT_ONCE):
            asked = holders[begin : begin + ASKED_AT_ONCE]
            answers = {peer: answer.word for peer, answer in (await self.ask(asked)).items()}
            if not any(word.claim.settled for word in answers.values()):
                living = self._out_of_reach(peer for peer in asked if peer not in answers)
                self.out_of_reach = {p: self.directory.others[p] for p in living if p in self.directory.others}
            stand_by_it = {peer for peer, word in answers.items() if not claimed[peer].beats(word.position)}
            claims.trust.disbelieve(peer for peer in asked if peer not in stand_by_it and peer not in self.out_of_reach)
            if answers:
                return answers
        return {}

    async def surroundings(self, position: LineagePosition, *, starts: bool = False) -> Surroundings:
        """Finds out who is there for a peer at `position` to average with. `starts`: it has ended no epoch yet, so
        those who are joining may have been started with it.

        It matters where a peer stands now: its report may be some epochs old.
        """
        directory, holders = self.directory, self.claims.holders()
        reports = [directory.others[peer] for peer in holders if self._endpoint.is_connected(peer)]
        if _judge(position, reports) == "company":
            return "company"
        await directory.refresh()  # a newcomer that has just settled is to find a mate, not to follow step by step
        # One that is joining or paused takes part in no round, and its line may be busy with a download. But a mate's
        # report may be of the time before its first round, or not be read yet, where epochs are short.
        told, mates = {peer: directory.others[peer] for peer in self.claims.holders()}, self.claims.mates.known
        works = {p for p, r in told.items() if (is_settled(r.phase) or p in mates) and r.pause != "paused"}
        there = (
            told.keys() if starts else works | set(filter(self._endpoint.is_connected, mates - directory.others.keys()))
        )
        asked = directory.by_convenience(there)[:ASKED_AT_ONCE]
        answers = await self.ask(asked)
        leading = await self.claims.decide(Claim(position), {peer: answer.word for peer, answer in answers.items()})
        if leading.beats(position):
            return "behind"
        judged = _judge(position, answers.values())
        if judged == "alone" and starts and any(answer.phase == "joining" for answer in answers.values()):
            return "followed"
        if judged == "alone":
            # Two peers that cannot dial each other meet at somebody whom both can, an auxiliary for example, who
            # needs a moment to find their lineage.
            silent = [peer for peer in asked if peer not in answers and not directory.is_away(peer)]
            alike = [peer for peer in silent if peer in told and told[peer].claim.position.lineage == position.lineage]
            return "followed" if self._out_of_reach(alike) else "alone"
        return judged

    async def anyone_behind(self, epoch: int) -> bool:
        """Whether a peer that holds a state, does not pause and can be reached has not come to this epoch yet."""
        others = await self.directory.refresh()
        holders = self.claims.holders()
        behind = [peer for peer in holders if others[peer].epoch < epoch and not self.directory.is_away(peer)]
        answers = await self.ask(behind[:ASKED_AT_ONCE])
        return any(answer.epoch < epoch for answer in answers.values())

    def _out_of_reach(self, silent: Iterable[PeerID]) -> list[PeerID]:
        """Those of these peers, who gave no answer, who are there, but connected with others alone."""
        return [peer for peer in silent if self.directory.is_there(peer) and not self._endpoint.is_connected(peer)]

    async def _ask(self, peer: PeerID) -> PositionReply | None:
        try:
            reply = await self._endpoint.call(
                peer, self._method, PositionRequest(), PositionReply, timeout=ANSWER_TIMEOUT
            )
        except NetworkError as error:
            logger.debug("%s did not say where it stands: %s", peer.short, error)
            return None
        hashes = [reply.lineage, *reply.trail]
        malformed = any(len(each) != LINEAGE_BYTES for each in hashes) or not is_count(reply.epoch, reply.samples)
        if malformed or reply.terms != self.directory.terms or not self.claims.trusts(reply.lineage):
            return None
        return reply

    async def _answer(self, peer: PeerID, request: PositionRequest) -> PositionReply:
        report = self.directory.describe()
        return PositionReply(
            report.epoch,
            report.samples_seen,
            bytes.fromhex(report.lineage),
            report.phase,
            report.terms,
            report.keeps,
            report.leaving,
            self.directory.history.trail(report.claim.position, MOST_TRAIL),
            report.pause,
        )


def _judge(position: LineagePosition, others: Iterable[PeerReport | PositionReply]) -> Surroundings:
    # A peer that has not settled yet may take its time with that, or end up elsewhere. One that pauses comes to no
    # round; one that returns from a pause is about to.
    at_work = [each for each in others if each.phase in _TAKE_PART and each.pause != "paused"]
    if any(each.claim.position.lineage == position.lineage for each in at_work):
        return "company"
    return "followed" if any(each.epoch == position.epoch - 1 for each in at_work) else "alone"
