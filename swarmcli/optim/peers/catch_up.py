"""How a peer stays on the run's lineage: which one that is, and how a peer that is behind gets its state.

    behind by one or two    own parameters ── averages of the missed rounds, by tag ──▶ in step
    a newcomer              pins a state ─────────── downloads it ────────────▶ ┐
                            later rounds, as they are committed ──▶ on disk ──▶ ┴ replays ──▶ in step

A peer that catches up is in no group, so nobody waits for it, however slow its line is.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from swarmcli.averaging import RoundResult
from swarmcli.averaging.round.archive import KeptRound
from swarmcli.backoff import growing
from swarmcli.concurrency import beside
from swarmcli.errors import NoDonorReachable, StateDownloadError
from swarmcli.events import Noticed, RoundsReplayed
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time, to_its_end
from swarmcli.optim.config import PeerContext
from swarmcli.optim.modes.gradients import GradientWork
from swarmcli.optim.peers.exchange import StateExchange
from swarmcli.optim.peers.follow import PeerWord
from swarmcli.optim.peers.proof import MOST_PROOFS, Heard, hear, weekday
from swarmcli.optim.peers.report import PeerReport, credited
from swarmcli.optim.peers.survey import Survey
from swarmcli.optim.state.lineage import TORN, Claim, LineagePosition
from swarmcli.state.download import DownloadProgress
from swarmcli.state.witnesses import LEAST_WITNESSES

# Seconds
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0  # between attempts to download: twice as long each time
PATIENCE_WITH_CLAIMS = 10.0  # for which a settled peer asks for a state while nothing of it comes
# For which a newcomer waits for peers that left only reports: these are kept for so long, and a mere claim may hold
# nobody up for longer.
PATIENCE_WITH_REPORTS = 60.0
ALONE_FOR = 15.0  # for which a peer without parameters looks for others if it sees nobody
STRANDED_AFTER = 3.0  # without anybody who could hand over the state, after which this peer says so
LOOK_AGAIN = 1.0  # between two looks of a stranded peer
LOOK_FOR_NEXT = 0.25  # between two requests for the next round
LONGEST_FETCH = 120.0  # without anything of a round, while a download is under way
MOST_REPLAYED = 2  # rounds; a peer that missed more downloads the state, since others keep no more
ASKED_AT_ONCE = 3  # donors that are asked for the next round, others each time
HELP = "Start one of them again, or name another peer (--peer); --begin-anew does without them"
logger = logging.getLogger(__name__)


class CatchUp:
    """Decides once on which lineage to train (then this peer is settled), and again whenever another one leads.

    Reports say that another lineage may lead; before this peer gives up its own, it asks the peers themselves. The
    words of settled peers that it can reach count. If none of them holds the leading lineage, but a peer that is there
    and out of reach does (two peers in client mode, for example, cannot dial each other), this peer waits for it: it is
    `stranded`, since going on would make a second model. A newcomer that has heard of a run which is further than its
    beginning waits in the same way for peers that hold it, see `_awaited`.
    """

    def __init__(self, peer: PeerContext, work: GradientWork, survey: Survey, exchange: StateExchange) -> None:
        self._work, self._replica = work, work.replica
        self._survey, self._claims, self._directory = survey, survey.claims, survey.directory
        self._clock = peer.node.endpoint.clock
        self._exchange = exchange
        self._events = peer.events
        self._load_state_timeout = peer.config.load_state_timeout
        self._proceed_alone = peer.config.proceed_alone  # instead of being stranded this peer trains on, and says so
        self.settled = False
        self.asked_at = 0.0  # swarm time when this peer last began to ask where the others are
        self.stranded = False
        self.waits = ""  # for whom this peer waits and since when, if it has only heard of them
        self.begins_anew = (
            peer.config.proceed_alone
        )  # the user wants the run begun anew if nobody who holds its state can be reached
        self.gives_up: Callable[[], bool] | None = None  # whether the user has had it with waiting; None: cannot say so
        self.lacks = "a download failed halfway"  # why this peer has no parameters, if it has none

    async def run(self, reason: str, *, returns: bool = False) -> bool:
        """Settles on the lineage that leads. Returns whether this peer's state changed for that.

        It replays missed rounds if that is enough; otherwise it downloads the state. A peer that `returns` has been
        away, perhaps for days: its mates may be gone, so it goes by who is there now, like a newcomer.

        It waits for a state that comes slowly: a round of minutes holds up downloads too. A newcomer that gets nothing
        of a state for `load_state_timeout` raises StateDownloadError, which says what failed with each donor; a settled
        peer gives up earlier, says so, and stays on its own lineage. A peer that is stranded for so long raises
        NoDonorReachable, settled or not; but a newcomer whose user can stop it (`gives_up`) waits without a bound.
        """
        began = moved = loop_time()
        changed, pauses = False, growing(FIRST_PAUSE, LONGEST_PAUSE)
        asked = set[PeerID]()  # peers that were asked how far the run is
        try:
            while True:
                moved = max(moved, self._exchange.moved)
                endless = self.gives_up is not None and not self.settled
                deadline = math.inf if endless else moved + self._load_state_timeout
                self.asked_at = self._clock.now()
                answers = await self._survey.survey()
                if not self.settled:
                    await self.hear(asked)
                settled = self.settled and not returns
                wanted = await self._claims.decide(Claim(self._replica.position, settled), answers)
                if wanted == TORN:
                    alone = not self._directory.others and self._claims.vouching.heard is None
                    text = f"{self.lacks}, and nobody is there who could give this peer the run's state"
                    await self._wait_for(text, began, min(deadline, began + ALONE_FOR) if alone else deadline)
                    continue
                if wanted == self._replica.position:
                    own, found = Claim(wanted, settled), self._survey.out_of_reach.items()
                    leading = {peer: report for peer, report in found if self._claims.is_led_by(peer, own)}
                    if leading and not self._goes_on_alone(leading):
                        lately = loop_time() - began
                        certain = any(self._clock.now() - each.time < lately for each in leading.values())
                        await self._wait_for(_out_of_reach(leading), began, deadline, certain=certain)
                        continue
                    self.waits = "" if leading else self._awaited(answers, began)
                    if not self.waits:
                        self._settle()
                        return changed
                    await self._wait_for(self.waits, began, deadline)
                    continue
                holders = [peer for peer, word in answers.items() if word.position.lineage == wanted.lineage]
                # Peers that pause are asked only if nobody else has the state; then, or it would be lost.
                holders = [peer for peer in holders if answers[peer].claim.settled] or holders
                donors = self._directory.by_convenience(holders)
                self.waits = ""
                try:
                    bridged = await self._bridge(wanted, donors, reason)
                    if not bridged:
                        await self._download_and_go_on(wanted, donors, reason)
                    changed, moved, self.stranded, returns = True, loop_time(), False, False
                    pauses = growing(FIRST_PAUSE, LONGEST_PAUSE)
                    if bridged and self.settled:  # if it asked once more, a short epoch's group would begin without it
                        return True
                except StateDownloadError as error:
                    logger.info("the state of epoch %d was not downloaded: %s", wanted.epoch, error)
                    if self._replica.state.torn:
                        self.settled = False  # it holds nothing to go on with, and says so
                        self._directory.announce(anew=True)
                    pause, stays = next(pauses), self.settled and not returns
                    patience = PATIENCE_WITH_CLAIMS if stays else self._load_state_timeout
                    if loop_time() + pause >= max(moved, self._exchange.moved) + patience:
                        if not stays:
                            raise
                        self._give_up_on(wanted, donors, error)
                    await asyncio.sleep(pause)
        finally:
            self.stranded, self.waits = False, ""

    def _settle(self) -> None:
        heard, epoch = self._claims.vouching.heard, self._replica.position.epoch
        further = not self.settled and heard is not None and heard.epoch > epoch + 1  # others may just end an epoch
        if self.stranded or further:
            text = "the peers that held the state of this run are gone, and no peer in reach has it"
            told = f" ({heard.sentence})" if heard is not None and further else ""
            self._events.emit(Noticed("warning", f"{text}{told}: this peer goes on from epoch {epoch}"))
        self.settled = True

    def lack_parameters(self, why: str) -> None:
        """The model's parameters are not those with which the run begins. So this peer takes over the state of peers
        that have them, or takes no part. Call it before it joins; a checkpoint that is loaded afterwards brings
        parameters, too."""
        self._replica.state.position, self.lacks = TORN, why

    def note_heard(self, *heard: Heard | None, begins_anew: bool = False) -> None:
        """This peer has heard earlier how far the run is. `begins_anew`: the user wants the run begun anew if nobody
        who holds its state can be reached."""
        self._claims.vouching.note_heard(*heard)
        self.begins_anew |= begins_anew

    async def hear(self, asked: set[PeerID]) -> None:
        """Asks peers that are there how far the run is, each once: they may be gone before their state is here. `asked`
        gets those that it has asked."""
        fresh = [peer for peer in self._directory.alike if peer not in asked and self._directory.is_there(peer)]
        peers = self._claims.in_turn(fresh)[:MOST_PROOFS]
        asked.update(peers)
        endpoint, run_id, others = self._directory.endpoint, self._directory.run_id, self._directory.others
        shown = (hear(endpoint, run_id, peer, others[peer].name or peer.short) for peer in peers)
        self._claims.vouching.note_heard(*await asyncio.gather(*shown))

    def _awaited(self, answers: Mapping[PeerID, PeerWord], began: float) -> str:
        """For whom a newcomer waits if it has heard that the run is further than its own state; "": for nobody.

        It does not wait if a settled peer is there, with which it goes along. Reports alone, which cost a liar nothing,
        hold it up no longer than they are kept. If it has a checkpoint, which may be all that is left of the run,
        nothing holds it up for longer either.
        """
        epoch, heard, waited = self._replica.position.epoch, self._claims.vouching.heard, loop_time() - began
        if self.settled or self.begins_anew or any(word.claim.settled for word in answers.values()):
            return ""
        early = waited < PATIENCE_WITH_REPORTS
        claims = (self._directory.others[peer].claim for peer in self._claims.holders())  # even if it disbelieves them
        reported = max((claim.position.epoch for claim in claims if claim.settled), default=0)
        if heard is not None and heard.epoch > epoch and (early or epoch == 0):
            told, ends = heard.sentence, epoch > 0
        elif early and reported > epoch:
            told, ends = f"reports say that this run is at epoch {reported}", True
        else:
            return ""
        since = weekday(self._clock.now() - waited)
        at_most = f", and this peer goes on without them after {PATIENCE_WITH_REPORTS:.0f} s" if ends else ""
        return f"{told}; nobody who holds it could be reached since {since}{at_most}. {HELP}"

    async def _wait_for(self, text: str, began: float, deadline: float, *, certain: bool = True) -> None:
        """Waits a moment: a peer that cannot be dialed may be about to dial this one. Raises NoDonorReachable after the
        `deadline` (loop time), and if the user gives up. `certain`: the peers for which it waits have reported since
        it began (`began`), so they are not dead."""
        waited = loop_time() - began
        if not self.stranded and certain and waited >= STRANDED_AFTER:
            self.stranded = True
            self._directory.announce()
            self._events.emit(Noticed("warning", f"this peer waits instead of training another model: {text}"))
        if self.gives_up is not None and self.gives_up():
            raise NoDonorReachable(f"told to stop while it waited: {text}")
        if loop_time() >= deadline:
            raise NoDonorReachable(f"after {waited:.0f} s this peer gives up: {text}")
        await asyncio.sleep(min(LOOK_AGAIN, deadline - loop_time()))

    def _goes_on_alone(self, leading: Mapping[PeerID, PeerReport]) -> bool:
        if self._proceed_alone:
            self._claims.set_apart(leading)
            text = f"this peer trains a model of its own (proceed_alone): {_out_of_reach(leading)}"
            self._events.emit(Noticed("error", text))
        return self._proceed_alone

    async def _download_and_go_on(self, wanted: LineagePosition, donors: Sequence[PeerID], reason: str) -> None:
        """Downloads the state at `wanted`, and goes on from there by the rounds that were committed meanwhile."""
        later = deque[KeptRound]()
        async with beside(self._collect(wanted, later, donors)):
            await self._download(wanted, donors, reason)
            # If several groups end the epochs, these may be rounds of any of them.
            while later and later[0].record.tag == self._replica.position.lineage and not self._replica.state.apart:
                await self._replay([later.popleft()], "epochs ended meanwhile")

    async def _download(self, wanted: LineagePosition, donors: Sequence[PeerID], reason: str) -> None:
        generation = self._replica.generation
        try:
            await self._exchange.download(
                wanted,
                donors,
                witnesses=self._claims.in_turn(donors),
                parameters=self._claims.vouching.owners.get(wanted.lineage),
                timeout=self._load_state_timeout,
                reason=reason,
            )
        except asyncio.CancelledError:
            if self._replica.generation != generation:  # the state has been replaced: earlier gradients are worthless
                await self._work.start_over()
            raise
        if self.settled and self._claims.mates and self._claims.mates.known.isdisjoint(donors):
            # If no mate can be asked, one stranger is enough: so two that have begun the same run apart come together.
            text = "this peer gives up its own, by the word of peers with which it was in no round"
            self._events.emit(Noticed("warning", f"{reason}: {text}"))
        self._claims.note_taken_over(wanted, donors)
        await to_its_end(self._work.start_over())

    def _give_up_on(self, wanted: LineagePosition, donors: Sequence[PeerID], error: StateDownloadError) -> None:
        self._claims.distrust(wanted.lineage)
        self._claims.trust.disbelieve(donors)  # its next lineage will be no better
        text = (
            f"nobody gave out the state of epoch {wanted.epoch}, so this peer stays at {self._replica.position.epoch}"
        )
        self._events.emit(Noticed("warning", f"{text}: {error}"))

    # rounds that others have kept

    async def _bridge(self, wanted: LineagePosition, donors: Sequence[PeerID], reason: str) -> bool:
        """Replays the one or two rounds that lead to `wanted`, if they can be had. Returns False, and changes nothing,
        if not.

        The chain of lineages proves that they are these rounds and no others. If lineages only count epochs, peers
        differ by design, and there is nothing to replay: this peer takes the position.
        """
        position = self._replica.position
        if not 1 <= wanted.epoch - position.epoch <= MOST_REPLAYED:
            return False
        if await to_its_end(self._work.pass_by(wanted)):
            self._claims.note_taken_over(wanted, donors)
            return True
        rounds: list[KeptRound] = []
        try:
            while position.epoch < wanted.epoch:
                with self._exchange.progress("a round that was missed") as progress:
                    kept = await self._fetch(position, donors, self._load_state_timeout, len(donors), progress)
                rounds.append(kept)
                position = _after(position, kept)
        except StateDownloadError as error:
            logger.info("the rounds up to epoch %d are not to be had: %s", wanted.epoch, error)
            return False
        if position != wanted:
            logger.info("the rounds that others keep lead elsewhere than to the lineage of epoch %d", wanted.epoch)
            return False
        await self._replay(rounds, reason)
        return True

    async def _collect(self, position: LineagePosition, later: deque[KeptRound], donors: Sequence[PeerID]) -> None:
        """Fetches the rounds that are committed from `position` on, one after the other, and appends them to `later`;
        their averages lie on disk. Runs until it is cancelled."""
        for turn in count():
            first = turn % len(donors)
            asked = [*donors[first:], *donors[:first]][:ASKED_AT_ONCE]
            try:
                kept = await self._fetch(position, asked, LONGEST_FETCH, len(donors))
                later.append(await kept.on_disk())
                position = _after(position, kept)
            except StateDownloadError as error:
                logger.debug("no round after epoch %d yet: %s", position.epoch, error)
                await asyncio.sleep(LOOK_FOR_NEXT)
            except OSError as error:
                logger.warning("rounds are not collected during the download: %s", error)
                return

    async def _fetch(
        self,
        position: LineagePosition,
        donors: Sequence[PeerID],
        timeout: float,
        among: int,
        progress: DownloadProgress | None = None,
    ) -> KeptRound:
        """Fetches the round that was committed at `position`. `among`: how many peers hold what it led to.

        The lineage proves which round it was, but not its averages. If there are so many holders that one may lie, the
        round's members must have signed for the averages.
        """
        averager = self._work.averager
        signed = among >= LEAST_WITNESSES or self._claims.mates.needed > 1
        part_size = averager.config.allreduce.part_size_bytes if signed else None
        return await averager.archive.fetch(
            donors,
            averager.layout,
            tag=position.lineage,
            part_size_bytes=part_size,
            timeout=timeout,
            progress=progress,
        )

    async def _replay(self, rounds: Sequence[KeptRound], reason: str) -> None:
        for kept in rounds:
            await to_its_end(self._step_with(kept))
        await self._replica.publish()
        position = self._replica.position
        self._events.emit(RoundsReplayed(position.epoch, position.lineage.hex(), len(rounds), reason))

    async def _step_with(self, kept: KeptRound) -> None:
        record = kept.record
        weights, samples = (
            dict(zip(record.contributors, each, strict=True)) for each in (record.weights, record.samples_of)
        )
        await self._work.replay(kept.averages, RoundResult(round_id=kept.group_id, weights=weights, samples=samples))
        self._claims.note_replayed(kept.group_id, kept.record.certificate)
        self._events.emit(credited(self._replica.position, samples))


def _out_of_reach(leading: Mapping[PeerID, PeerReport]) -> str:
    """Names the peers that lead, and says what helps."""
    names = [report.name or peer.short for peer, report in leading.items()]
    named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    epoch = max(report.epoch for report in leading.values())
    holds = "holds" if len(names) == 1 else "hold"
    return (
        f"{named} {holds} the state of this run (epoch {epoch}), and this peer reaches nobody who could hand it over: "
        "start `swarm monitor` or `swarm aux` on a computer that all can dial, which passes on what they send each "
        "other, or set averaging.proceed_alone to train apart"
    )


def _after(position: LineagePosition, kept: KeptRound) -> LineagePosition:
    return position.after(kept.group_id, kept.record.total_samples)
