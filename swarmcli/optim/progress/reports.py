"""The reports of the others, and how many did not count and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

from swarmcli.network.identity import Identity, PeerID
from swarmcli.optim.progress.board import Board
from swarmcli.optim.progress.progress import LocalTrainingProgress, Timeliness, timeliness

if TYPE_CHECKING:
    from swarmcli.dht import DHTNode

Kind: TypeAlias = Literal["forged", "malformed", "replayed", "stale", "future-dated"]


class ReportBoard:
    """`{prefix}_progress`: one record per peer, written under `identity` (None: the node's own)."""

    def __init__(self, node: DHTNode, prefix: str, expiration: float, identity: Identity | None = None) -> None:
        self._clock = node.endpoint.clock
        self._board = Board(node, f"{prefix}_progress", LocalTrainingProgress, expiration, identity)
        self._expiration = expiration
        self._counts: Counter[Kind] = Counter()
        self._read: Mapping[PeerID, LocalTrainingProgress] = {}  # everything as it was last read
        self.others: tuple[LocalTrainingProgress, ...] = ()  # of it, what others signed about themselves

    @property
    def owner(self) -> PeerID:
        """Under whose identity this peer reports."""
        return self._board.owner

    @property
    def dropped(self) -> Mapping[Kind, int]:
        """How many reports did not count, by kind; one that is stored here as well as read from others counts twice.

        forged        not signed by the peer that it is about
        malformed     of another shape, or beyond its bounds
        replayed      older, by its owner's own numbering, than one that was known (a replica may also just lag)
        stale         when it was read first, older than reports live
        future-dated  from later than clocks can be apart
        """
        refused = Counter(self._board.refused)
        forged = refused.pop("signature", 0) + self._counts["forged"]
        malformed = refused.total() + self._board.dropped
        return {**self._counts, "forged": forged, "malformed": malformed, "replayed": self._board.outdated}

    async def publish(self, report: LocalTrainingProgress) -> bool:
        """Whether any replica took it."""
        return await self._board.publish(report)

    async def withdraw(self) -> None:
        await self._board.withdraw()

    async def refresh(self) -> None:
        """Reads what is new."""
        before, self._read = self._read, await self._board.refresh()
        self.others = tuple(r for peer, r in self._read.items() if peer == r.peer_id and peer != self.owner)
        now = self._clock.now()
        for peer, report in self._read.items():
            if before.get(peer) != report:
                self._count(peer, report, now)

    def _count(self, peer: PeerID, report: LocalTrainingProgress, now: float) -> None:
        when = timeliness(report, now, self._expiration)
        if peer != report.peer_id:
            self._counts["forged"] += 1
        elif when is Timeliness.STALE:
            self._counts["stale"] += 1
        elif when is Timeliness.FUTURE:
            self._counts["future-dated"] += 1
