"""A way to train, as one object: what it refuses, the work it builds, and what follows from it for a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from swarmcli.averaging import AveragerCore
from swarmcli.averaging.checks import check_flags
from swarmcli.compression import CompressionBase, NoCompression
from swarmcli.events import Events, Noticed
from swarmcli.optim.epoch.wait import Timing
from swarmcli.optim.state.volumes import VOLUME_BYTES

if TYPE_CHECKING:
    from swarmcli.averaging import AveragerConfig
    from swarmcli.dht import DHTNode
    from swarmcli.optim.config import PeerContext, SiteHooks, Trained
    from swarmcli.optim.epoch.group import Committed
    from swarmcli.optim.epoch.work import EpochWork
    from swarmcli.optim.peers.lineage import Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """When and how the peers' states are averaged, and how a state travels to a newcomer."""

    average_every: int | None = None  # epochs; None: with local updates every epoch, otherwise when sketches part
    delay: bool = True  # training goes on meanwhile, and what was learned meanwhile is added to the average
    statistics: tuple[str, ...] = ()  # of the optimizer, by name, that are averaged with the parameters
    tolerance: float = 1e-3  # distance between parameters, relative to their norm, above which they are repaired
    compression: CompressionBase = field(default_factory=NoCompression)
    load_compression: CompressionBase = field(default_factory=NoCompression)
    volume_bytes: int = VOLUME_BYTES  # a constant of the protocol; only tests have another one, at all peers

    def __post_init__(self) -> None:
        every = self.average_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"average_state_every={every!r}: expected None or a positive number of epochs")
        for name, codec in (("state_averaging", self.compression), ("load_state", self.load_compression)):
            if not isinstance(codec, CompressionBase):
                raise TypeError(f"{name}_compression={codec!r}: expected a codec such as Float16Compression()")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"state_tolerance={self.tolerance!r}: expected a number between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class Mode(ABC):
    """What the peers of a run do with their batches, with its options. Each way to train is a subclass in a file of its
    own, named in `modes/__init__.py`. Raises ValueError for options that cannot work together, with the reason.
    """

    timing: Timing = Timing.AT_ONCE
    reuse_grad_buffers: bool = False  # the parameters' gradients are the sums: no other buffer
    share_gradients: bool = False  # the last average is part of the state that newcomers download
    target_group_size: int | None = None  # where more peers are there, several groups end each epoch; None: never
    state: StateOptions = StateOptions()

    def __post_init__(self) -> None:
        check_flags(reuse_grad_buffers=self.reuse_grad_buffers, use_ext_grad_buffer=self.share_gradients)
        codec = self.state.compression
        if self.target_group_size is not None and not isinstance(codec, NoCompression):
            raise ValueError(
                f"state_averaging_compression={codec.description!r}: with target_group_size states travel as they are, "
                "since several groups have no common average that differences could be told from; use NoCompression()"
            )

    @abstractmethod
    def build(self, peer: PeerContext, trained: Trained, site: SiteHooks) -> EpochWork:
        """What one trainer does in its epochs. Raises ValueError for hooks that have no meaning in this mode."""

    @abstractmethod
    def assisting_averager(
        self, node: DHTNode, config: AveragerConfig, parameters: Sequence[torch.Tensor]
    ) -> AveragerCore:
        """What reduces for the trainers at an auxiliary. `parameters`: tensors that are never touched, of the shapes of
        the trainers' parameters."""

    @property
    def averages_gradients(self) -> bool:
        """Whether a round averages the gradients of an epoch, so that all parameters stay equal. Otherwise every peer
        steps by itself, and its rounds only agree on samples."""
        return True

    # lineages

    def by_epoch(self, several: bool) -> bool:
        """Whether peers differ by design after an epoch, so that their lineage only counts epochs; `several`: groups
        ended it."""
        return several or not self.averages_gradients

    def after(self, standing: Standing, committed: Committed, target_batch_size: int) -> Standing:
        """Where a round leads that was committed at `standing`."""
        if self.by_epoch(committed.several):
            return standing.by_epoch(target_batch_size)
        return standing.after(committed.round_id, committed.samples)

    # the averaging of states

    def average_state_every(self, several: bool) -> int | None:
        """Epochs; None: when sketches of the peers' parameters part. `several`: groups ended the last one."""
        every = self.state.average_every
        return 1 if every is None and self.by_epoch(several) else every

    def state_weight(self, samples: int) -> float:
        """Of a peer with so many samples in the epoch, when states are averaged after it."""
        return 1.0

    @property
    def state_compression(self) -> CompressionBase:
        """The codec of averaged states. Where they are only averaged to repair them nobody has a reference, and one
        would take as much memory as a state: they travel as they are."""
        return NoCompression() if self.average_state_every(several=False) is None else self.state.compression


class GivenUp:
    """Counts how often gradients that are not finite were given up, and says so: once for each row of such batches, for
    a model that has diverged gives no others."""

    def __init__(self, events: Events) -> None:
        self.count = 0
        self._events = events
        self._said = False

    def note(self, samples: int, scale: float | None = None) -> None:
        """So many samples were dropped; `scale`: of their losses."""
        self.count += 1
        if not self._said:
            scaled = "" if scale is None else f", scaled by {scale:g},"
            text = f"{samples} samples of this peer are given up: their gradients{scaled} are not finite"
            self._events.emit(Noticed("warning", text))
        self._said = True

    def end(self) -> None:
        """A batch was sound."""
        self._said = False
