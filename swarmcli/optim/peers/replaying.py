"""Missing a round costs a replay: steps with the averages that others keep of the rounds that this peer missed.

    behind by one or two    own parameters ── averages of the missed rounds, by tag ──▶ in step
    a newcomer              pins a state ─────────── downloads it ────────────▶ ┐
                            later rounds, as they are committed ──▶ on disk ──▶ ┴ replays ──▶ in step

A peer that only listens takes no part in the rounds that it collects, so however slow its link is, nobody waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count

from swarmcli.averaging.archive.archive import StoredRound
from swarmcli.averaging.archive.kept_round import KeptRound
from swarmcli.errors import StateDownloadError
from swarmcli.events import Events, RoundsReplayed
from swarmcli.network.identity import PeerID
from swarmcli.optim.epoch.work import EpochWork
from swarmcli.optim.peers.lineage import Standing
from swarmcli.state.unnamed_file import UnnamedFile, usual_directory
from swarmcli.tasks import beside

MOST_ROUNDS = 2  # that are replayed rather than downloaded: as many as others keep
ASKED_AT_ONCE = 3  # of the donors, in turn, for the next round
LOOK_FOR_NEXT = 0.25  # seconds between two questions for the next round
LONGEST_FETCH = 120.0  # seconds for one round while a download is under way

logger = logging.getLogger(__name__)


class Replayer:
    """Brings a replica forward by rounds that others have kept."""

    def __init__(self, work: EpochWork, events: Events) -> None:
        self._work, self._replica, self._events = work, work.replica, events

    async def bridge(self, wanted: Standing, donors: Sequence[PeerID], *, timeout: float, reason: str) -> bool:
        """Steps to `wanted` if the one or two rounds that lead there can be had; False, and nothing changed, if not.

        The chain of lineages proves that they are these rounds and no others. Where it only counts epochs, peers differ
        by design and there is nothing to step with: the epochs are passed by. `timeout` is in seconds.
        """
        standing = self._replica.standing
        if not 1 <= wanted.epoch - standing.epoch <= MOST_ROUNDS:
            return False
        if await self._work.pass_by(wanted):
            return True
        if not self._work.replays:
            return False
        rounds: list[KeptRound] = []
        try:
            async with asyncio.timeout(timeout):
                while standing.epoch < wanted.epoch:
                    rounds.append(await self._fetch(standing, donors, timeout))
                    standing = _after(standing, rounds[-1])
        except (StateDownloadError, TimeoutError) as error:
            logger.info("the rounds up to epoch %d are not to be had: %s", wanted.epoch, error)
            return False
        if standing != wanted:
            logger.info("the rounds that others keep lead elsewhere than to the lineage of epoch %d", wanted.epoch)
            return False
        await self._replay(rounds, reason)
        return True

    @asynccontextmanager
    async def collecting(self, begin: Standing, donors: Sequence[PeerID]) -> AsyncIterator[Collection]:
        """While the block runs, rounds committed on `begin` and its followers are put by."""
        collection = Collection(begin)
        if not self._work.replays:
            yield collection
            return
        try:
            async with beside(self._collect(collection, donors)):
                yield collection
        finally:
            collection.close()

    async def start_over(self) -> None:
        """The state has been replaced: what this peer collected belongs to another one."""
        await self._work.start_over()

    async def replay(self, collection: Collection, reason: str) -> None:
        """Steps with all that was collected, and still is meanwhile, from the state on which the collection began.

        Not where several groups end the epochs: what was collected are then rounds of one of them or the other.
        """
        if self._replica.state.apart:
            return
        while collection.rounds and self._replica.standing == collection.begin:
            await self._replay([collection.rounds[0].load()], reason)
            collection.drop_first()

    async def _collect(self, collection: Collection, donors: Sequence[PeerID]) -> None:
        for turn in count():
            asked = [donors[(turn + place) % len(donors)] for place in range(min(ASKED_AT_ONCE, len(donors)))]
            try:
                await collection.add(await self._fetch(collection.end, asked, LONGEST_FETCH))
            except StateDownloadError as error:
                logger.debug("no round after epoch %d yet: %s", collection.end.epoch, error)
                await asyncio.sleep(LOOK_FOR_NEXT)
            except OSError as error:
                logger.warning("rounds are not collected during the download: %s", error)
                return

    async def _fetch(self, standing: Standing, donors: Sequence[PeerID], timeout: float) -> KeptRound:
        averager = self._work.averager
        return await averager.archive.fetch(donors, averager.layout, tag=standing.lineage, timeout=timeout)

    async def _replay(self, rounds: Sequence[KeptRound], reason: str) -> None:
        for kept in rounds:
            await self._work.replay(kept.averages, kept.group_id, kept.record.samples)
        await self._replica.publish()
        standing = self._replica.standing
        self._events.emit(RoundsReplayed(standing.epoch, standing.lineage.hex(), len(rounds), reason))


class Collection:
    """Rounds that followed each other from `begin` to `end`, on disk."""

    def __init__(self, begin: Standing) -> None:
        self.begin = self.end = begin
        self.rounds: deque[StoredRound] = deque()

    async def add(self, kept: KeptRound) -> None:
        """The next round. Raises OSError if it cannot be written."""
        file = UnnamedFile(usual_directory())
        try:
            stored = await StoredRound.write(kept.record, kept.averages, file)
        except (OSError, asyncio.CancelledError):
            file.close()
            raise
        self.rounds.append(stored)
        self.end = _after(self.end, kept)

    def drop_first(self) -> None:
        """The first round has been used."""
        first = self.rounds.popleft()
        self.begin = self.begin.after(first.record.group_id, first.record.samples)
        first.file.close()

    def close(self) -> None:
        """Lets go of the files."""
        for stored in self.rounds:
            stored.file.close()


def _after(standing: Standing, kept: KeptRound) -> Standing:
    return standing.after(kept.group_id, kept.record.samples)
