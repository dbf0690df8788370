"""How peers agree on who keeps the run's state: one writes checkpoints, and a peer that leaves asks who stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmcli.network.identity import PeerID
from swarmcli.optim.config import Role
from swarmcli.optim.state.lineage import Claim

if TYPE_CHECKING:
    from swarmcli.optim.participant import Participant


class Succession:
    """One trainer's or follower's part in that: it tells the others of its checkpoints, and asks them about theirs."""

    def __init__(self, core: Participant) -> None:
        self.offered = False  # whether it writes checkpoints, see PeerReport.keeps
        self._core = core

    def offer(self, offered: bool) -> None:
        """Tells the others whether this peer writes checkpoints as the run goes on."""
        if self.offered != offered:
            self.offered = offered
            self._core.directory.announce()

    async def is_elsewhere(self) -> bool:
        """Whether a peer that comes before this one, can be reached and is at most one round behind writes checkpoints.
        A monitor comes before a trainer, and the smaller id before the greater.

        Everybody finds the same peer as soon as everybody knows the same peers; until then two may write, never nobody.
        """

        def rank(peer: PeerID, role: Role) -> tuple[bool, bytes]:
            return role != "monitor", bytes(peer)

        core = self._core
        own, others = rank(core.node.peer_id, core.config.description.role), core.directory.others
        offering = {peer: rank(peer, others[peer].role) for peer in core.claims.holders() if others[peer].keeps}
        epoch = core.position.epoch
        found = await core.survey.find(
            sorted((peer for peer, its in offering.items() if its < own), key=offering.__getitem__),
            lambda answer: answer.keeps and answer.stays and answer.epoch >= epoch - 1,
        )
        return found is not None

    async def leave(self, *, relies: bool = True) -> tuple[PeerID, int] | None:
        """This peer is about to leave. Returns a peer that can be reached, stays, and holds this peer's state or one
        that beats it, and the epoch of that state; None: nobody answers so within seconds.

        `relies`: this peer relies on others to keep its state, and tells everyone who asks that it leaves. It says so
        before it asks: of two that leave at once, the second to ask then hears from the first that it leaves too.
        """
        core = self._core
        core.leaving, own = relies, core.position
        found = await core.survey.find(
            core.directory.by_convenience(core.claims.holders()),
            lambda answer: answer.stays and answer.word.holds(own.lineage),
        )
        return None if found is None else (found[0], found[1].epoch)

    async def furthest(self) -> int | None:
        """The highest epoch at which a peer that can be reached holds the leading state; None: nobody does."""
        words = await self._core.survey.survey()
        if not words:
            return None
        found = await self._core.claims.decide(Claim(self._core.position, settled=False), words)
        held = [word.position.epoch for word in words.values() if word.claim.settled and word.holds(found.lineage)]
        return max(held, default=None)
