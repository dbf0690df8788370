"""Codecs: how fast they encode and decode, and what they lose, beside hivemind's in the same run.

Each message carries 2 MiB of float32, as parts of a round do; one torch thread. Speeds are MiB of float32 per second,
the best of several turns. Errors are the root of the mean square over that of the tensor: of normal numbers, and of
numbers in which one in a thousand is a hundred times larger, as in gradients.

    python -m benchmarks.compression
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from swarmcli.compression import (
    BFloat16Compression,
    BlockwiseQuantization,
    CompressionBase,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    TensorMessage,
    Uniform8BitQuantization,
)

ELEMENTS = 1 << 19
TURNS = 20
CODECS: list[CompressionBase] = [
    NoCompression(),
    Float16Compression(),
    BFloat16Compression(),
    ScaledFloat16Compression(),
    Uniform8BitQuantization(),
    Quantile8BitQuantization(),
    BlockwiseQuantization(4096, "linear"),
    BlockwiseQuantization(4096, "dynamic"),
]
_HERE = Path(__file__).parent
_PEERS_PYTHON = _HERE.parent / ".venv-peers" / "bin" / "python"


def make_tensors() -> tuple[torch.Tensor, torch.Tensor]:
    """Normal numbers, and the same with outliers. hivemind's script draws the same ones."""
    normal = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    outliers = normal.clone()
    outliers[::1000] *= 100
    return normal, outliers


def measure(codec: CompressionBase) -> dict[str, float | None]:
    normal, outliers = make_tensors()
    message, out = _received(codec.compress(normal)), torch.empty(ELEMENTS)
    return {
        "bytes": codec.compress(normal).payload_size / normal.numel(),
        "encode": _speed(lambda: codec.compress(normal)),
        "decode": _speed(lambda: codec.extract(message, out)),
        "normal": _error(codec, normal),
        "outliers": _error(codec, outliers),
    }


def _received(message: TensorMessage) -> TensorMessage:
    return TensorMessage(message.header, (bytearray(b"".join(message.payload)),))


def _speed(work: Callable[[], object]) -> float:
    """MiB of float32 per second."""
    best = float("inf")
    for _ in range(TURNS):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return ELEMENTS * 4 / best / (1 << 20)


def _error(codec: CompressionBase, tensor: torch.Tensor) -> float:
    restored = codec.extract(_received(codec.compress(tensor)))
    return float((restored - tensor).norm() / tensor.norm())


def measure_hivemind() -> dict[str, dict[str, float | None]]:
    """The same figures by codec, of those that need nothing beyond hivemind; empty if it is not installed."""
    if not _PEERS_PYTHON.exists():
        return {}
    command = [str(_PEERS_PYTHON), str(_HERE / "peers" / "compression_hivemind.py"), str(ELEMENTS), str(TURNS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def main() -> None:
    torch.set_num_threads(1)
    theirs = measure_hivemind()
    columns = ("bytes", "encode", "decode", "normal", "outliers")
    print(f"{'':28}{'':10}" + "".join(f"{column:>10}" for column in columns))
    for codec in CODECS:
        _print(codec.name, "swarm", measure(codec))
        if codec.name in theirs:
            _print("", "hivemind", theirs[codec.name])


def _print(name: str, whose: str, figures: dict[str, float | None]) -> None:
    formats = {"bytes": ".3f", "encode": ".0f", "decode": ".0f", "normal": ".2g", "outliers": ".2g"}
    cells = ("-" if figures[column] is None else format(figures[column], spec) for column, spec in formats.items())
    print(f"{name:28}{whose:10}" + "".join(f"{cell:>10}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
