"""Keeps the states of a run's peers together: when they are averaged, and what happens to one that has drifted away.

every n epochs     the states are averaged after each n-th epoch, in the background if that is delayed
by sketches        peers report sketches of their parameters; after each epoch this peer compares its own with those of
                   the round's members, and downloads the others' state if its own is further away than the tolerance
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmcli.averaging import RoundResult
from swarmcli.optim.epoch.group import EpochRule
from swarmcli.optim.epoch.note import MemberNote
from swarmcli.optim.state.averaging import Occasion, StateAveraging, state_config
from swarmcli.optim.state.drift import DriftMonitor
from swarmcli.optim.state.replica import Replica

if TYPE_CHECKING:
    from swarmcli.optim.config import PeerContext
    from swarmcli.optim.modes.gradients import Mode
    from swarmcli.optim.peers.directory import PeerDirectory


class StateKeeper:
    """One peer's part in keeping all states together. Call its coroutines only while the trainer waits."""

    def __init__(
        self, peer: PeerContext, mode: Mode, replica: Replica, rule: EpochRule, directory: PeerDirectory
    ) -> None:
        """The averager of the states has the options of that of the gradients (`peer.averaging`), but its own codec.
        `directory` knows the others.

        Raises OptimizerError for statistics that cannot be averaged.
        """
        node, config, options = peer.node, peer.config, mode.state
        own = state_config(config.run_id, peer.averaging, options.compression)
        self.averaging = StateAveraging(node, own, replica, options.statistics, config.fingerprint)
        self.monitor = DriftMonitor(node.peer_id, peer.events, config.run_id, replica, options.tolerance)
        self.strayed = False  # the others' state has to replace this peer's, and its position says so
        self._node, self.replica, self.mode = node, replica, mode
        self.rule, self._directory = rule, directory
        self._delay = options.delay

    @property
    def gathered(self) -> MemberNote | None:
        """What the members of the next group are to know of this peer and its state; None: nothing."""
        if self.mode.target_group_size is None:
            return None
        return MemberNote(several=self.rule.several, apart=self.replica.state.apart)

    async def look(self) -> None:
        """Before a group opens: makes the sketch that this peer will report, unless all states are averaged
        regularly."""
        self.strayed = False
        if self.mode.average_state_every(self.replica.state.apart) is None:
            await self.monitor.look()

    async def after_epoch(self, committed: RoundResult, weight: float) -> None:
        """After this peer's step: averages or repairs the state, if that is due. `weight`: its own in that epoch."""
        every = self.mode.average_state_every(committed.several)
        if not committed.several and (committed.apart or self.replica.state.apart):
            await self._unite(committed)
        elif len(committed.members) > 1 or committed.several:
            if every is not None:
                if self.replica.position.epoch % every == 0:
                    await self._average(committed, weight)
            else:
                await self.look()
                await self._compare(committed)

    def drop(self) -> None:
        """The state has been replaced by another peer's."""
        self.strayed = False
        self.monitor.drop()
        self.averaging.drop()

    async def _unite(self, committed: RoundResult) -> None:
        """Several groups ended the epochs so far, and one has ended this: everyone takes over one member's state, since
        the statistics of all differ. Without that they would only drift further apart."""
        self.averaging.drop()
        # The first member: all members have the same list. Without a list this peer has ended the epoch alone.
        if self._node.peer_id in (committed.members or (self._node.peer_id,))[:1]:
            self.replica.state.apart = False
        else:
            await self.replica.change(self._go_astray)

    async def _average(self, committed: RoundResult, own: float) -> None:
        # Ends the last averaging, if that has taken a whole epoch: two at a time would need memory for two more states.
        await self.averaging.apply(wait=True)
        position, weight = self.replica.position, self.mode.state_weight(own)
        # If there are several groups, nobody knows who is in the others: then all peers that are known are expected.
        mates = tuple(self._directory.at_work()) if committed.several else committed.members + committed.helpers
        occasion = Occasion(position.lineage, position.epoch, weight, mates, several=committed.several)
        await self.averaging.begin(occasion, changes=self._delay)
        if not self._delay:
            await self.averaging.apply(wait=True)

    async def _compare(self, committed: RoundResult) -> None:
        reports = self._directory.others
        mates = {peer: reports[peer].sketch for peer in committed.members if peer in reports}
        if self.monitor.strays(mates, self.replica.position.epoch):
            await self.replica.change(self._go_astray)

    def _go_astray(self) -> None:
        """Takes a position that the others' beats, so that this peer follows them like any other lineage that leads."""
        state = self.replica.state
        state.position = state.position.astray(self._node.peer_id)
        self.monitor.drop()
        self.strayed = True
