"""Tasks, their data, and the loop that computes gradients for the swarm."""

from swarmcli.training.causal_lm import CausalLanguageModelling, build_task
from swarmcli.training.checkpoint import (
    Checkpoint,
    checkpoints_below,
    epoch_of,
    find_checkpoint,
    load_checkpoint,
)
from swarmcli.training.checkpoint_store import CheckpointStore
from swarmcli.training.device import Compute, choose_compute
from swarmcli.training.loop import (
    CollaborativeOptimizer,
    EpochReport,
    LoopResult,
    LoopSettings,
    StepReport,
    TrainingLoop,
)
from swarmcli.training.schedule import (
    build_optimizer,
    build_scheduler,
    optimizer_factory,
    optimizer_kind,
    parameter_groups,
)
from swarmcli.training.stream import STREAM, RememberedStream
from swarmcli.training.task import Batch, BatchStream, Task, stream_seed
from swarmcli.training.tokenizer import ByteTokenizer, SavedTokenizer, load_tokenizer

__all__ = [
    "STREAM",
    "Batch",
    "BatchStream",
    "ByteTokenizer",
    "CausalLanguageModelling",
    "Checkpoint",
    "CheckpointStore",
    "CollaborativeOptimizer",
    "Compute",
    "EpochReport",
    "LoopResult",
    "LoopSettings",
    "RememberedStream",
    "SavedTokenizer",
    "StepReport",
    "Task",
    "TrainingLoop",
    "build_optimizer",
    "build_scheduler",
    "build_task",
    "checkpoints_below",
    "choose_compute",
    "epoch_of",
    "find_checkpoint",
    "load_checkpoint",
    "load_tokenizer",
    "optimizer_factory",
    "optimizer_kind",
    "parameter_groups",
    "stream_seed",
]
