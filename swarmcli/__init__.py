"""Train one neural network together on computers that strangers lend.

The public names are loaded when they are first used, so that the command line answers at once and importing the
package takes neither network nor threads. Import it before torch: see `startup.let_threads_sleep`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swarmcli.startup import let_threads_sleep

if TYPE_CHECKING:
    from swarmcli.averaging import DecentralizedAverager
    from swarmcli.clock import get_dht_time
    from swarmcli.compression import Float16Compression, NoCompression
    from swarmcli.dht import DHT
    from swarmcli.optim import (
        GradientAverager,
        GradScaler,
        Optimizer,
        Outer,
        PowerEFGradientAverager,
        PowerSGDGradientAverager,
        ProgressTracker,
    )
    from swarmcli.sharding import HierarchicalModelAverager, ZeroRedundancyOptimizer
    from swarmcli.version import __version__

let_threads_sleep()

_HOMES = {
    "DHT": "swarmcli.dht",
    "DecentralizedAverager": "swarmcli.averaging",
    "Float16Compression": "swarmcli.compression",
    "GradScaler": "swarmcli.optim",
    "GradientAverager": "swarmcli.optim",
    "HierarchicalModelAverager": "swarmcli.sharding",
    "NoCompression": "swarmcli.compression",
    "Optimizer": "swarmcli.optim",
    "Outer": "swarmcli.optim",
    "PowerEFGradientAverager": "swarmcli.optim",
    "PowerSGDGradientAverager": "swarmcli.optim",
    "ProgressTracker": "swarmcli.optim",
    "ZeroRedundancyOptimizer": "swarmcli.sharding",
    "__version__": "swarmcli.version",
    "get_dht_time": "swarmcli.clock",
}
_SUBPACKAGES = ("averaging", "compression", "dht", "optim", "sharding", "testing")

__all__ = [
    "DHT",
    "DecentralizedAverager",
    "Float16Compression",
    "GradScaler",
    "GradientAverager",
    "HierarchicalModelAverager",
    "NoCompression",
    "Optimizer",
    "Outer",
    "PowerEFGradientAverager",
    "PowerSGDGradientAverager",
    "ProgressTracker",
    "ZeroRedundancyOptimizer",
    "__version__",
    "get_dht_time",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _SUBPACKAGES:
        return import_module(f"swarmcli.{name}")
    raise AttributeError(f"module 'swarmcli' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBPACKAGES])
