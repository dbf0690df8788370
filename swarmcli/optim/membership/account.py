"""What a peer tells of itself: to the others in its report, and in events to whoever watches it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from swarmcli.events import EpochAdvanced, EpochReported, Noticed
from swarmcli.network.identity import PeerID
from swarmcli.optim.config import OptimizerConfig
from swarmcli.optim.epoch.group import Failed, Undecided
from swarmcli.optim.membership.ledger import Ledger
from swarmcli.optim.membership.lineage import Standing
from swarmcli.optim.membership.report import PeerReport, Phase, describe

if TYPE_CHECKING:
    from swarmcli.dht import DHTNode


class Account:
    """One peer's. Its ledger, phase, rate and drift are told in the next report; events are told at once."""

    def __init__(
        self, node: DHTNode, config: OptimizerConfig, standing: Callable[[], Standing], phase: Phase = "joining"
    ) -> None:
        self.ledger = Ledger()
        self.phase = phase
        self.keeps = False  # see PeerReport
        self.leaving = False
        self.rate: Callable[[], float] = float  # samples per second; 0.0 unless somebody knows better
        self.drift: Callable[[], float | None] = lambda: None
        self.lost: Callable[[], bool] = bool  # whether a round is long over whose outcome this peer has not asked for
        self.stranded: Callable[[], bool] = bool  # whether it waits for a state that nobody can hand over
        self._node = node
        self._config = config
        self._standing = standing

    @property
    def peer_id(self) -> PeerID:
        return self._node.peer_id

    def begin(self) -> None:
        """The present epoch begins for this peer: what it did before was waiting."""
        self.ledger.begin(_now())

    def look(self, *, anyone_computes: bool) -> None:
        """See Ledger.look."""
        self.ledger.look(_now(), anyone_computes=anyone_computes)

    def report(self) -> PeerReport:
        """What this peer says about itself under `{run_id}_peers`."""
        return describe(
            self._node,
            self._config.description,
            self._config.terms,
            self.ledger,
            self._phase(),
            self._standing(),
            samples_per_second=self.rate(),
            drift=self.drift(),
            keeps=self.keeps,
            leaving=self.leaving,
        )

    def _phase(self) -> Phase:
        """A trainer that stopped calling `step` while a round began is nobody to wait for, once that round is over: it
        is joining, until it steps again and finds out where the run is."""
        if self.stranded():
            return "stranded"
        return "joining" if self.phase == "training" and self.lost() else self.phase

    def note_failure(self, outcome: Failed | Undecided) -> None:
        """A round ended without a result."""
        self.ledger.note_outcome("undecided" if isinstance(outcome, Undecided) else "failed", outcome.reason)

    def warn(self, text: str) -> None:
        """A person should read this."""
        self._node.endpoint.events.emit(Noticed("warning", text))

    def end_epoch(self, *, samples: int = 0, own_samples: int = 0, peers: int = 0, seconds: float = 0.0) -> None:
        """This peer has come to its present standing: with a round of so many samples and peers that took so many
        seconds, or with another peer's state."""
        standing = self._standing()
        loss, length = self.ledger.end_epoch(_now(), standing.epoch)
        events = self._node.endpoint.events
        if loss is not None:
            events.emit(EpochReported(self.peer_id.text, standing.epoch, loss, self.ledger.samples, self.rate()))
        events.emit(
            EpochAdvanced(
                epoch=standing.epoch,
                lineage=standing.lineage.hex(),
                samples=samples,
                own_samples=own_samples,
                peers=peers,
                loss=loss,
                seconds=length,
                averaging_seconds=seconds,
            )
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
