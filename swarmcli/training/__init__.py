"""Tasks, their data, and the loop that computes gradients for the swarm."""

from swarmcli.training.checkpoint import Checkpoint, CheckpointStore, load_checkpoint, saved_buffers
from swarmcli.training.device import Compute, choose_compute
from swarmcli.training.loop import (
    CollaborativeOptimizer,
    LoopResult,
    LoopSettings,
    TrainingLoop,
    evaluate,
)
from swarmcli.training.schedule import (
    build_scheduler,
    optimizer_factory,
    optimizer_kind,
    parameter_groups,
)
from swarmcli.training.stream import STREAM
from swarmcli.training.task import Batch, MeasuredTask, Task, stream_seed
from swarmcli.training.tasks import build_task, check_smoothing
from swarmcli.training.tokenizer import ByteTokenizer

__all__ = [
    "STREAM",
    "Batch",
    "ByteTokenizer",
    "Checkpoint",
    "CheckpointStore",
    "CollaborativeOptimizer",
    "Compute",
    "LoopResult",
    "LoopSettings",
    "MeasuredTask",
    "Task",
    "TrainingLoop",
    "build_scheduler",
    "build_task",
    "check_smoothing",
    "choose_compute",
    "evaluate",
    "load_checkpoint",
    "optimizer_factory",
    "optimizer_kind",
    "parameter_groups",
    "saved_buffers",
    "stream_seed",
]
