"""Survey: asks peers for their positions, by the call `{run_id}.position`, and answers that.

Reports are seconds old. Where that matters (am I behind? am I alone?) a peer asks the others themselves.
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

MOST_TRAIL = 8  # lineages through which a peer says that it came
ASKED_AT_ONCE = 16  # peers: one answer usually suffices
Surroundings = Literal[
    "alone",  # nobody on this lineage can be reached
    "company",  # somebody trains on it
    "followed",  # nobody does yet, but somebody may soon: a peer is one epoch behind, or starts as this one does
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
        """Whether others may rely on this peer to keep the state that it holds."""
        return self.claim.settled and self.phase != "assisting" and not self.leaving

    @property
    def claim(self) -> Claim:
        settled = is_settled(self.phase) and not is_away(self.pause)
        return Claim(LineagePosition(self.epoch, self.samples, self.lineage), settled)

    @property
    def word(self) -> PeerWord:
        return PeerWord(self.claim, self.trail)


class Survey:
    """Asks the peers of a directory, in an order that a flood of claims cannot change."""

    def __init__(self, claims: Claims) -> None:
        self.claims, self.directory = claims, claims.directory
        self.out_of_reach: dict[PeerID, PeerReport] = {}  # peers that were there, but did not answer the last survey
        self._endpoint = self.directory.endpoint
        self._method = f"{self.directory.run_id}.position"

    async def start(self) -> None:
        """Begins to answer with this peer's position, and starts the claims and the directory."""
        self._endpoint.serve(self._method, PositionRequest, self._answer)
        await self.claims.start()

    async def shutdown(self) -> None:
        """Ends all three, and says goodbye. Idempotent; leaves no task."""
        self._endpoint.withdraw(self._method)
        await self.claims.shutdown()

    async def ask(self, peers: Iterable[PeerID]) -> dict[PeerID, PositionReply]:
        """Asks these peers for their positions. Those that give no valid answer are missing in the result."""
        asked = list(peers)
        answers = await asyncio.gather(*map(self._ask, asked))
        return {peer: answer for peer, answer in zip(asked, answers, strict=True) if answer is not None}

    async def find(
        self, peers: Iterable[PeerID], fits: Callable[[PositionReply], bool]
    ) -> tuple[PeerID, PositionReply] | None:
        """Asks the first few of these peers. Returns the first one whose answer fits, and the answer."""
        answers = await self.ask(list(peers)[:ASKED_AT_ONCE])
        return next(((peer, answer) for peer, answer in answers.items() if fits(answer)), None)

    async def survey(self) -> dict[PeerID, PeerWord]:
        """Asks the peers that report a state, a few at a time, until some of them answer. Returns their words.

        So reports of peers that are gone, and claims that nobody stands by, count for nothing. This peer does not ask
        one that reported more than it now says for a while, unless nobody else is left. If no settled peer answers,
        `out_of_reach` are those that are there all the same.
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
        """Finds out with whom this peer, which is at `position`, can average. `starts`: it has ended no epoch yet, so
        peers that are joining may have been started with it.

        It asks them, since their reports may be some epochs old.
        """
        directory, holders = self.directory, self.claims.holders()
        reports = [directory.others[peer] for peer in holders if self._endpoint.is_connected(peer)]
        if _judge(position, reports) == "company":
            return "company"
        await directory.refresh()  # so that a newcomer that has just settled finds a mate, and is not always one behind
        # A peer that is joining or paused takes part in no round, and its line may be busy with a download. But if
        # epochs are short, a mate's report may be older than its first round, or not be read yet.
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
            # Two peers that cannot dial each other meet at a third one that both can dial, an auxiliary for example,
            # which needs a moment to find their lineage.
            silent = [peer for peer in asked if peer not in answers and not directory.is_away(peer)]
            alike = [peer for peer in silent if peer in told and told[peer].claim.position.lineage == position.lineage]
            return "followed" if self._out_of_reach(alike) else "alone"
        return judged

    async def anyone_behind(self, epoch: int) -> bool:
        """Whether a peer that reports a state, can be reached and does not pause is behind this epoch."""
        others = await self.directory.refresh()
        holders = self.claims.holders()
        behind = [peer for peer in holders if others[peer].epoch < epoch and not self.directory.is_away(peer)]
        answers = await self.ask(behind[:ASKED_AT_ONCE])
        return any(answer.epoch < epoch for answer in answers.values())

    def _out_of_reach(self, silent: Iterable[PeerID]) -> list[PeerID]:
        """Of these peers, which gave no answer, those that are there but not connected with this one."""
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
    # A peer that has not settled may take its time, or end up elsewhere. A paused one comes to no round; one that
    # returns from a pause soon will.
    at_work = [each for each in others if each.phase in _TAKE_PART and each.pause != "paused"]
    if any(each.claim.position.lineage == position.lineage for each in at_work):
        return "company"
    return "followed" if any(each.epoch == position.epoch - 1 for each in at_work) else "alone"
