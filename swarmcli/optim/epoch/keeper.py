"""Keeps the states of a run's peers together: when they are averaged, and what happens to one that has drifted away.

every n epochs     the states are averaged after each n-th epoch, in the background where that is delayed
by sketches        members of the group that ends an epoch bring sketches of their parameters to it; all compare them
                   with the median, and repair what is further away than the tolerance after that epoch
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from swarmcli.network.identity import PeerID
from swarmcli.optim.epoch.group import EpochRule
from swarmcli.optim.modes.base import CommittedRound
from swarmcli.optim.state.averaging import StateAveraging
from swarmcli.optim.state.drift import Comparison, DriftMonitor, MemberNote
from swarmcli.optim.state.replica import Replica
from swarmcli.optim.state.rounds import Occasion, state_config

if TYPE_CHECKING:
    from swarmcli.optim.config import PeerContext
    from swarmcli.optim.modes.base import Mode


PAUSE = 8  # epochs between two averagings for the sake of drift: a liar in a pair could ask for one in every epoch


class StateKeeper:
    """One peer's part in keeping all states together. Its coroutines are called while the trainer waits."""

    def __init__(
        self, peer: PeerContext, mode: Mode, replica: Replica, rule: EpochRule, at_work: Callable[[], Iterable[PeerID]]
    ) -> None:
        """The averager of the states is like that of the gradients (`peer.averaging`), with its own codec. `at_work`
        gives the others who take part in the run's rounds, as far as known.

        Raises OptimizerError for statistics that cannot be averaged.
        """
        node, config, options = peer.node, peer.config, mode.state
        own = state_config(config.run_id, peer.averaging, mode.state_compression)
        self.averaging = StateAveraging(
            node, own, replica, options.statistics, config.fingerprint, volume_bytes=options.volume_bytes
        )
        self.monitor = DriftMonitor(node, config.run_id, replica, options.tolerance)
        self.strayed = False  # this peer's state has to be replaced by the others', and its position says so
        self._node, self.replica, self.mode = node, replica, mode
        self.rule, self._at_work = rule, at_work
        self._delay = options.delay
        self._found: Comparison | None = None  # in the round under way
        self._rests_until = 0  # epoch before which states that disagree are not averaged again

    @property
    def gathered(self) -> MemberNote | None:
        """Tells the members of the next group about this peer and its state; None: nothing."""
        told = self.monitor.told
        if self.mode.target_group_size is None:
            return told
        state = self.replica.state
        told = told or MemberNote(state.position.epoch)
        return msgspec.structs.replace(told, several=self.rule.several, apart=state.apart)

    async def look(self) -> None:
        """Before a group opens: how this peer's state compares will be asked, unless all are averaged regularly."""
        self.strayed = False
        if self.mode.average_state_every(self.replica.state.apart) is None:
            await self.monitor.look()

    def compare(self, gathered: Mapping[PeerID, bytes]) -> bool:
        """When a round begins, with what its members told: whether this peer has strayed, so that its gradients, of
        other parameters than everyone else's, must stay out."""
        self._found = self.monitor.compare(gathered)
        return self._found is not None and self.monitor.is_stray(self._found)

    async def after_epoch(self, committed: CommittedRound, weight: float) -> None:
        """Once this peer has stepped: what is due is averaged or repaired. `weight` was its own in that epoch."""
        found, self._found = self._found, None
        self.monitor.note_members(committed.members)
        every = self.mode.average_state_every(committed.several)
        if not committed.several and (committed.apart or self.replica.state.apart):
            await self._unite(committed)
        elif len(committed.members) > 1 or committed.several:
            if every is not None:
                if self.replica.position.epoch % every == 0:
                    await self._average(committed, weight)
            elif found is not None:
                await self._repair(committed, found)
        if not self.strayed:
            await self.look()

    def drop(self) -> None:
        """The state has been replaced by another peer's."""
        self._found, self.strayed = None, False
        self._rests_until = 0  # in epochs of the former state; those of a run that begins anew may be far below
        self.monitor.drop()
        self.averaging.drop()

    async def _unite(self, committed: CommittedRound) -> None:
        """Several groups ended the epochs so far and one has ended this: everyone takes over one member's state, for
        the statistics of all differ. Later than this, they would only drift apart again."""
        self.averaging.drop()
        # The first member, alike for everyone: all of them have the same list. Without one, this peer ended it alone.
        if self._node.peer_id in (committed.members or (self._node.peer_id,))[:1]:
            self.replica.state.apart = False
        else:
            await self.replica.change(self._go_astray)

    async def _average(self, committed: CommittedRound, own: float) -> None:
        # The last one, if it has taken a whole epoch: two at a time would need memory for two more states.
        await self.averaging.apply(wait=True)
        weight = self.mode.state_weight(own)
        helpers = committed.helpers if self.mode.by_epoch(committed.several) else ()
        await self._begin(committed, weight, helpers=helpers, changes=self._delay)
        if not self._delay:
            await self.averaging.apply(wait=True)

    async def _repair(self, committed: CommittedRound, found: Comparison) -> None:
        epoch = self.replica.position.epoch
        if self.monitor.is_stray(found):
            await self.replica.change(self._go_astray)
        elif found.disagree and epoch >= self._rests_until:
            self._rests_until = epoch + PAUSE
            await self._begin(committed, 1.0, changes=False)
            await self.averaging.apply(wait=True)

    def _go_astray(self) -> None:
        """Under a position that the others' beats, so that this peer follows them as any other lineage that leads."""
        state = self.replica.state
        state.position = state.position.astray(self._node.peer_id)
        self.monitor.drop()
        self.strayed = True

    async def _begin(
        self, committed: CommittedRound, weight: float, *, helpers: tuple[PeerID, ...] = (), changes: bool
    ) -> None:
        position = self.replica.position
        # Nobody knows who is in the other groups, if there are several: all who are known are expected then.
        mates = tuple(self._at_work()) if committed.several else committed.members + helpers
        occasion = Occasion(position.lineage, position.epoch, weight, mates, several=committed.several)
        await self.averaging.begin(occasion, changes=changes)
