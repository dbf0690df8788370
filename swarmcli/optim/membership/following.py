"""Staying in the run's lineage: which one that is, and taking its state over from those who hold it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from swarmcli.errors import StateDownloadError
from swarmcli.events import Events, Noticed
from swarmcli.network.identity import PeerID
from swarmcli.optim.membership.lineage import Claim, Standing, lineage_to_follow
from swarmcli.optim.membership.presence import Presence
from swarmcli.optim.membership.replaying import Replayer
from swarmcli.optim.membership.state_exchange import StateExchange

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0  # seconds between attempts to download
PATIENCE_WITH_CLAIMS = 10.0  # seconds for which a settled peer knocks for a state that nobody hands out
DISTRUST = 120.0  # seconds for which such a lineage is then ignored
logger = logging.getLogger(__name__)


class LineageFollower:
    """Decides once which lineage to train on (then this peer is settled), and again whenever another one leads.

    Reports tell that something may be wrong; before anything is given up for it, the peers themselves are asked.
    """

    def __init__(
        self,
        presence: Presence,
        exchange: StateExchange,
        replayer: Replayer,
        standing: Callable[[], Standing],
        events: Events,
        load_state_timeout: float,
    ) -> None:
        self._presence = presence
        self._exchange = exchange
        self._replayer = replayer
        self._standing = standing
        self._events = events
        self._load_state_timeout = load_state_timeout
        self.settled = False

    @property
    def leading(self) -> Standing:
        """The lineage that leads by the others' last reports: this peer's own if none beats it."""
        return self._leading(self._presence.claims())

    async def catch_up(self, reason: str) -> bool:
        """Settles on the lineage that leads. Returns whether this peer's state is another one for it.

        Rounds that were missed are replayed where that is enough; otherwise the state is downloaded.

        A newcomer that gets the state from nobody within `load_state_timeout` raises StateDownloadError, which names
        what failed with each donor; a settled peer gives up earlier, says so, and stays on its own lineage.
        """
        deadline = _now() + self._load_state_timeout
        give_up_at = min(deadline, _now() + PATIENCE_WITH_CLAIMS) if self.settled else deadline
        changed, pause = False, FIRST_PAUSE
        while True:
            answers = await self._presence.survey()
            wanted = self._leading(answers.values())
            if wanted == self._standing():
                self.settled = True
                self._presence.announce()
                return changed
            holders = [peer for peer, claim in answers.items() if claim.standing.lineage == wanted.lineage]
            donors = self._presence.by_convenience(holders)
            try:
                await self._take_over(wanted, donors, max(0.0, deadline - _now()), reason)
                changed, pause = True, FIRST_PAUSE
            except StateDownloadError as error:
                logger.info("the state of epoch %d was not downloaded: %s", wanted.epoch, error)
                if _now() + pause >= give_up_at:
                    self._give_up_on(wanted, donors, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _take_over(self, wanted: Standing, donors: Sequence[PeerID], timeout: float, reason: str) -> None:
        """Brings this peer to `wanted`, and on from there if a download took longer than an epoch."""
        if await self._replayer.bridge(wanted, donors, timeout=timeout, reason=reason):
            return
        async with self._replayer.collecting(wanted, donors) as collection:
            await self._exchange.download(wanted, donors, timeout=timeout, reason=reason)
            await self._replayer.start_over()
            await self._replayer.replay(collection, "epochs ended during the download")

    def _leading(self, claims: Iterable[Claim]) -> Standing:
        return lineage_to_follow(Claim(self._standing(), self.settled), claims)

    def _give_up_on(self, wanted: Standing, donors: Sequence[PeerID], error: StateDownloadError) -> None:
        if not self.settled:
            raise error
        self._presence.distrust(wanted.lineage, DISTRUST)
        self._presence.doubt(donors)  # its next lineage will be no better
        text = f"nobody gave out the state of epoch {wanted.epoch}, so this peer stays at {self._standing().epoch}"
        self._events.emit(Noticed("warning", f"{text}: {error}"))


def _now() -> float:
    return asyncio.get_running_loop().time()
