"""What averagers around an optimizer have in common: rounds over copies, the delta rule, a whole state for others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import torch

from swarmcli.averaging import DecentralizedAverager, RoundResult, StepControl
from swarmcli.averaging.state.distant import loaded
from swarmcli.errors import AveragingError
from swarmcli.optim.state.residence import Residence
from swarmcli.optim.state.slots import Slot
from swarmcli.optim.state.state_buffers import StateBuffers
from swarmcli.optim.state.training_state import CapturedState, TrainingState

if TYPE_CHECKING:
    from swarmcli.dht import DHT

logger = logging.getLogger(__name__)


class OptimizerAverager(DecentralizedAverager):
    """Averages copies of some tensors of a training state, and moves the state by what the average brought.

    Others download the whole state from here: parameters, statistics, scheduler, extra tensors, epoch.
    """

    def __init__(
        self,
        state: TrainingState,
        place: Residence,
        slots: Iterable[Slot],
        *,
        dht: DHT,
        prefix: str,
        start: bool,
        **averager_options: Any,
    ) -> None:
        """`slots` are what is averaged of `state`, whose parameters are in `place`."""
        self._state = state
        self._place = place
        self._buffers = StateBuffers(slots, statistics=state.statistics)
        self._changing = threading.RLock()  # held while the state changes or is copied
        averager_options.setdefault("tensor_infos", self._buffers.infos)
        super().__init__(self._buffers.tensors, dht, prefix=prefix, start=start, **averager_options)

    def schedule_step(self, scheduled_time: float | None = None, **averaging_options: Any) -> StepControl:
        """Begins to find a group for a round that comes later; `scheduled_time` is swarm time."""
        return DecentralizedAverager.step(
            self, scheduled_time=scheduled_time, require_trigger=True, wait=False, **averaging_options
        )

    def load(self, *, changes: bool) -> None:
        """Copies what the next round averages; waits for the end of one under way. `changes`: the state may change
        until `apply_average`. OptimizerError: a statistic that was asked for is none."""
        with self.get_tensors(), self._changing:
            self._buffers.load(changes=changes)

    def average_loaded(self, control: StepControl | None, options: Mapping[str, Any]) -> RoundResult | None:
        """One round with what was copied; the state stays as it is. None (logged) if there is no average."""
        control = control or self.schedule_step(**options)
        try:
            control.allow_allreduce()
            return control.result()
        except (AveragingError, CancelledError) as error:
            logger.warning("no average of the states of %r: %s", self.prefix, error)
            return None
        finally:
            control.cancel()  # without effect unless the waiting was interrupted

    def apply_average(self) -> None:
        """Moves the state by the delta rule, after a round that gave an average."""
        with self.get_tensors(), self._changing:
            self._buffers.apply()
            self._place.publish()

    def get_current_state(self) -> tuple[Any, Sequence[torch.Tensor]]:
        """The whole state, as newcomers download it."""
        with self._changing:
            captured = self._state.capture().clone()
        here = [tensor if isinstance(tensor, torch.Tensor) else loaded(tensor) for tensor in captured.tensors.values()]
        return {"state": captured.metadata, "names": list(captured.tensors)}, here

    def load_state_from_peers(self, timeout: float | None = None) -> bool:  # type: ignore[override]
        """Downloads the state of others and goes on from it; False (logged) if nobody gave one that fits."""
        loaded = super().load_state_from_peers(timeout=timeout)
        if loaded is None:
            return False
        try:
            with self._changing:
                self._state.restore(_read_state(*loaded))
                self._place.publish()
        except ValueError as error:
            logger.warning("the state of %r that came does not fit: %s", self.prefix, error)
            return False
        return True


def _read_state(metadata: Any, tensors: Sequence[torch.Tensor]) -> CapturedState:
    """What get_current_state of another peer gave. Raises ValueError if it is nothing of the kind."""
    names = metadata.get("names") if isinstance(metadata, dict) else None
    state = metadata.get("state") if isinstance(metadata, dict) else None
    if not isinstance(state, dict) or not isinstance(names, list) or len(names) != len(tensors):
        raise ValueError("it is not a training state")
    if not all(isinstance(name, str) for name in names):
        raise ValueError("its tensors have no names")
    return CapturedState(state, dict(zip(names, tensors, strict=True)))
