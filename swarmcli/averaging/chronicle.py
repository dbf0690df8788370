"""What happened in one try at a round: time per stage, and the event that tells of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from swarmcli.averaging.control import AveragingStage, StepControl
from swarmcli.averaging.group import Group
from swarmcli.events import RoundFinished, RoundOutcome
from swarmcli.network.identity import PeerID


class Chronicle:
    """One try. `group` is set once there is one."""

    def __init__(self, control: StepControl, purpose: str, time: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        self.group: Group | None = None
        self._control = control
        self._purpose = purpose
        self._time = time

    @contextmanager
    def stage(self, stage: AveragingStage) -> Iterator[None]:
        """Moves the control to this stage and adds up the time that the block takes."""
        self._control.enter(stage)
        began = self._time()
        try:
            yield
        finally:
            self.seconds[stage.value] = self.seconds.get(stage.value, 0.0) + self._time() - began

    def ended(
        self,
        outcome: RoundOutcome,
        reason: str = "",
        *,
        contributors: tuple[PeerID, ...] = (),
        left_out: dict[PeerID, str] | None = None,
        bytes_sent: int = 0,
        bytes_received: int = 0,
    ) -> RoundFinished:
        group = self.group
        return RoundFinished(
            round_id=group.group_id.hex() if group is not None else "",
            purpose=self._purpose,
            outcome=outcome,
            reason=reason,
            epoch=self._control.request.epoch,
            leader=group.leader.text if group is not None else "",
            members=tuple(member.peer_id.text for member in group.members) if group is not None else (),
            contributors=tuple(peer.text for peer in contributors),
            left_out={peer.text: why for peer, why in (left_out or {}).items()},
            bytes_sent=bytes_sent,
            bytes_received=bytes_received,
            seconds=dict(self.seconds),
        )
