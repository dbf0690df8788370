"""The task of a run, as the rest of training knows it: one small interface."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn

if TYPE_CHECKING:
    from torchmetrics import Metric  # importing it takes seconds, which only evaluations need

Batch: TypeAlias = Mapping[str, Tensor]  # all tensors have the samples in their first dimension


class BatchStream(Protocol):
    """Micro-batches, one after the other."""

    def __iter__(self) -> Iterator[Batch]: ...
    def __next__(self) -> Batch: ...
    def position(self) -> Mapping[str, Any]:
        """Where the stream is after the last batch: what JSON can hold, and less than some megabytes."""


class Task(Protocol):
    """A model, its data and its loss. A task of your own needs these five methods and no base class."""

    def build_model(self, *, outline: bool = False) -> nn.Module:
        """Returns the model on the CPU in float32, in training mode. Peers with one recipe get equal weights.

        `outline`: only its shapes, on torch's meta device, which take no memory.
        """

    def batches(self, seed: int, position: Mapping[str, Any] | None = None) -> BatchStream:
        """Returns an endless stream of micro-batches on the CPU; the same seed gives the same stream.

        With the `position` of a stream of the same seed it goes on there. Raises DataError when the data is missing or
        cannot be read, and ValueError for a position that belongs to other data.
        """

    def evaluation_batches(self) -> Sequence[Batch]:
        """Returns micro-batches that nobody trains on, always the same. Raises DataError where there are none."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the mean loss over the samples of a batch (see also WeighsBatches), a scalar that gradients flow
        from. A task whose loss uses the recipe's `label_smoothing_factor` says so by an attribute `smooths_labels =
        True`."""

    def save_preprocessing(self, directory: Path) -> None:
        """Writes what turns raw data into a model's inputs, such as a tokenizer, beside the saved model. Raises
        OSError."""


# numbers of the parts of one pass over a source that this peer has begun, in its order
Parts: TypeAlias = tuple[int, ...]


class PartChooser(Protocol):
    """Chooses which part of a source this peer reads next, in a pass that it shares with others."""

    seed: str  # all peers draw the order of a pass from it

    def next_part(self, source: int, parts: int, number: int, begun: Parts) -> tuple[int, int]:
        """Returns the number of a pass and the part to read in it. This peer has begun the parts `begun` of the pass
        `number`."""

    def settle(self, passes: Sequence[int], read: Sequence[Parts]) -> None:
        """Is called when the samples of all parts of these passes that this peer has begun, except the last one of
        each, are drawn."""


@runtime_checkable
class SharesPasses(Protocol):
    """A task whose streams can read what other peers of the run have not read."""

    def share(self, chooser: PartChooser) -> None:
        """From now on all streams that `batches` makes read parts of passes that peers share, as `chooser` chooses."""


@runtime_checkable
class MeasuredTask(Task, Protocol):
    """A task whose evaluations tell more than the loss."""

    def metrics(self) -> Mapping[str, Metric]:
        """Returns new, empty metrics by their names (up to 8, of small letters, digits and _)."""

    def measure(self, model: nn.Module, batch: Batch, metrics: Mapping[str, Metric]) -> Tensor:
        """Returns the loss as `loss` does, but without smoothing, and updates `metrics` with what the model answers."""


@runtime_checkable
class WeighsBatches(Protocol):
    """A task whose loss is a mean over something else than samples, such as the tokens that are learned."""

    def weight(self, batch: Batch) -> float:
        """Returns over how much this batch's loss is a mean. 0: nothing in it is learned, so no loss is asked for."""


def weight_of(task: Task, batch: Batch) -> float:
    """The weight of a batch's gradients beside those of others: in a step, in the swarm, and in an evaluation."""
    return task.weight(batch) if isinstance(task, WeighsBatches) else samples_in(batch)


def samples_in(batch: Batch) -> int:
    """The number of samples of a batch."""
    return next(iter(batch.values())).shape[0]


def stream_seed(seed: int, peer_id: bytes) -> int:
    """The seed of one peer's stream of data: always the same for one peer, different for any two peers."""
    digest = hashlib.sha256(b"swarm data stream" + seed.to_bytes(8, "big") + bytes(peer_id)).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # fits into a signed 64-bit integer
