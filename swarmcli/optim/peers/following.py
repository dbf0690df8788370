"""Staying in the run's lineage: which one that is, and taking its state over from those who hold it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from swarmcli.errors import NoDonorReachable, StateDownloadError
from swarmcli.events import Noticed
from swarmcli.network.identity import PeerID
from swarmcli.optim.config import PeerContext
from swarmcli.optim.peers.lineage import TORN, Claim, Standing, lineage_to_follow
from swarmcli.optim.peers.presence import Presence
from swarmcli.optim.peers.replaying import Replayer
from swarmcli.optim.peers.report import PeerReport
from swarmcli.optim.peers.state_exchange import StateExchange
from swarmcli.optim.state.replica import Replica

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0  # seconds between attempts to download
PATIENCE_WITH_CLAIMS = 10.0  # seconds for which a settled peer knocks for a state that nobody hands out
DISTRUST = 120.0  # seconds for which such a lineage is then ignored
STRANDED_AFTER = 3.0  # seconds without anybody who could hand over the state, before that is told
LOOK_AGAIN = 1.0  # seconds between two looks of a stranded peer
logger = logging.getLogger(__name__)


class LineageFollower:
    """Decides once which lineage to train on (then this peer is settled), and again whenever another one leads.

    Reports tell that something may be wrong; before anything is given up for it, the peers themselves are asked. What
    those say counts who have settled and can be reached. Where there is none, a peer that lives and leads all the same
    (two peers in client mode, for example, cannot dial each other) is waited for: this peer is `stranded`, since going
    on would make a second model.
    """

    def __init__(
        self, peer: PeerContext, replica: Replica, presence: Presence, exchange: StateExchange, replayer: Replayer
    ) -> None:
        self._replica = replica
        self._presence = presence
        self._exchange = exchange
        self._replayer = replayer
        self._events = peer.events
        self._load_state_timeout = peer.config.load_state_timeout
        self._proceed_alone = peer.config.proceed_alone  # a peer that is stranded trains on, and says so
        self.settled = False
        self.stranded = False
        self.gives_up: Callable[[], bool] = bool  # whether the user wants no more waiting

    @property
    def leading(self) -> Standing:
        """The lineage that leads by the others' last reports: this peer's own if none beats it."""
        return self._leading(self._presence.claims())

    async def catch_up(self, reason: str) -> bool:
        """Settles on the lineage that leads. Returns whether this peer's state is another one for it.

        Rounds that were missed are replayed where that is enough; otherwise the state is downloaded.

        A newcomer that gets the state from nobody within `load_state_timeout` raises StateDownloadError, which names
        what failed with each donor; a settled peer gives up earlier, says so, and stays on its own lineage. One that is
        stranded for so long raises NoDonorReachable, settled or not.
        """
        deadline = _now() + self._load_state_timeout
        changed, pause, began = False, FIRST_PAUSE, _now()
        patient_until = min(deadline, began + PATIENCE_WITH_CLAIMS)
        try:
            while True:
                answers = await self._presence.survey()
                wanted = self._leading(answers.values())
                if wanted == TORN:
                    await self._wait_for_anyone(deadline)
                    continue
                if wanted == self._replica.standing:
                    leading = self._presence.leads_out_of_reach(Claim(wanted, self.settled))
                    if self.stranded and not leading:
                        self._note_departure()
                    if not leading or self._goes_on_alone(leading):
                        self.settled = True
                        self._presence.announce()
                        return changed
                    await self._wait_for(leading, began, deadline)
                    continue
                holders = [peer for peer, claim in answers.items() if claim.standing.lineage == wanted.lineage]
                donors = self._presence.by_convenience(holders)
                try:
                    why = self._why(wanted, reason)
                    await self._take_over(wanted, donors, max(0.0, deadline - _now()), why)
                    changed, pause, self.stranded = True, FIRST_PAUSE, False
                except StateDownloadError as error:
                    logger.info("the state of epoch %d was not downloaded: %s", wanted.epoch, error)
                    if self._replica.state.torn:
                        self.settled = False  # it holds nothing to go on with, and says so
                        self._presence.announce(anew=True)
                    if _now() + pause >= (patient_until if self.settled else deadline):
                        self._give_up_on(wanted, donors, error)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            self.stranded = False

    def _why(self, wanted: Standing, reason: str) -> str:
        """The reason, for people: a round that was missed accounts for one epoch and no more."""
        epoch = self._replica.standing.epoch
        if not self.settled or wanted.epoch <= epoch + 1:
            return reason
        return f"another peer holds epoch {wanted.epoch}, and this one held {epoch}"

    async def _wait_for(self, leading: Mapping[PeerID, PeerReport], began: float, deadline: float) -> None:
        """A moment: whoever listens may just be about to be dialed by the one that cannot be."""
        text = _out_of_reach(leading)
        waited = _now() - began
        certain = any(self._presence.lives_for_certain(peer, waited) for peer in leading)  # no dead peer's report
        if not self.stranded and certain and waited >= STRANDED_AFTER:
            self.stranded = True
            self._presence.announce()
            self._events.emit(Noticed("warning", f"this peer waits instead of training another model: {text}"))
        if self.gives_up():
            raise NoDonorReachable(f"told to stop while it waited: {text}")
        if _now() >= deadline:
            raise NoDonorReachable(f"after {self._load_state_timeout:.0f} s this peer gives up: {text}")
        await asyncio.sleep(min(LOOK_AGAIN, deadline - _now()))

    async def _wait_for_anyone(self, deadline: float) -> None:
        """This peer's parameters are torn, and nobody is there who has others."""
        if _now() >= deadline or self.gives_up():
            raise NoDonorReachable("a download failed halfway, and nobody is left who could give this peer the state")
        await asyncio.sleep(min(LOOK_AGAIN, deadline - _now()))

    def _note_departure(self) -> None:
        """Whoever led is gone. A newcomer has nothing to go on with: its user decides whether to begin the run anew."""
        gone = "whoever held the state of this run is gone, and has handed it to nobody whom this peer can reach"
        if not self.settled:
            raise NoDonorReachable(f"{gone}; start this peer again to begin the run anew")
        self._events.emit(Noticed("warning", f"{gone}: this peer goes on from epoch {self._replica.standing.epoch}"))

    def _goes_on_alone(self, leading: Mapping[PeerID, PeerReport]) -> bool:
        if self._proceed_alone:
            self._presence.set_apart(leading)
            text = f"this peer trains a model of its own (proceed_alone): {_out_of_reach(leading)}"
            self._events.emit(Noticed("error", text))
        return self._proceed_alone

    async def _take_over(self, wanted: Standing, donors: Sequence[PeerID], timeout: float, reason: str) -> None:
        """Brings this peer to `wanted`, and on from there if a download took longer than an epoch."""
        if await self._replayer.bridge(wanted, donors, timeout=timeout, reason=reason):
            return
        async with self._replayer.collecting(wanted, donors) as collection:
            await self._exchange.download(wanted, donors, timeout=timeout, reason=reason)
            await self._replayer.start_over()
            await self._replayer.replay(collection, "epochs ended during the download")

    def _leading(self, claims: Iterable[Claim]) -> Standing:
        return lineage_to_follow(Claim(self._replica.standing, self.settled), claims)

    def _give_up_on(self, wanted: Standing, donors: Sequence[PeerID], error: StateDownloadError) -> None:
        if not self.settled:
            raise error
        self._presence.distrust(wanted.lineage, DISTRUST)
        self._presence.doubt(donors)  # its next lineage will be no better
        text = (
            f"nobody gave out the state of epoch {wanted.epoch}, so this peer stays at {self._replica.standing.epoch}"
        )
        self._events.emit(Noticed("warning", f"{text}: {error}"))


def _out_of_reach(leading: Mapping[PeerID, PeerReport]) -> str:
    """Who leads, and what helps."""
    names = [report.name or peer.short for peer, report in leading.items()]
    named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    epoch = max(report.epoch for report in leading.values())
    holds = "holds" if len(names) == 1 else "hold"
    return (
        f"{named} {holds} the state of this run (epoch {epoch}), and this peer reaches nobody who could hand it over: "
        "start `swarm monitor` on a computer that all can dial (an auxiliary holds no state), or set "
        "averaging.proceed_alone to train apart"
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
