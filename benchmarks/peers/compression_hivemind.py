"""hivemind's side of benchmarks/compression.py: prints figures by codec as one line of JSON. Runs in .venv-peers.

Its block-wise codec needs bitsandbytes, which is not installed with it, and is left out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from hivemind.compression import (
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    Uniform8BitQuantization,
)
from hivemind.compression.quantization import Quantization

CODECS: dict[str, CompressionBase] = {
    "none": NoCompression(),
    "float16": Float16Compression(),
    "scaled_float16": ScaledFloat16Compression(),
    "uniform_8bit": Uniform8BitQuantization(),
    "quantile_8bit": Quantile8BitQuantization(),
}


def speed(work: Callable[[], object], elements: int, turns: int) -> float:
    best = float("inf")
    for _ in range(turns):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return elements * 4 / best / (1 << 20)


def error(codec: CompressionBase, tensor: torch.Tensor) -> float:
    message = codec.compress(tensor.clone(), CompressionInfo.from_tensor(tensor, key=0))
    return float((decoded(codec, message) - tensor).norm() / tensor.norm())


def decoded(codec: CompressionBase, message: Any) -> torch.Tensor:
    """With numpy 2.4 hivemind 1.1.12 fails to read the length of its own code books, so they are read here."""
    if not isinstance(codec, Quantization):
        return codec.extract(message)
    buffer = bytearray(message.buffer)
    length = int.from_bytes(buffer[:8], "little")
    levels = torch.frombuffer(buffer, dtype=torch.float32, count=length, offset=8)
    return levels[torch.frombuffer(buffer, dtype=torch.uint8, offset=8 + 4 * length).long()]


def decoding_speed(codec: CompressionBase, message: Any, elements: int, turns: int) -> float | None:
    try:
        return speed(lambda: codec.extract(message), elements, turns)
    except TypeError:
        return None


def main(elements: int, turns: int) -> None:
    torch.set_num_threads(1)
    normal = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    outliers = normal.clone()
    outliers[::1000] *= 100
    figures = {}
    for name, codec in CODECS.items():
        info = CompressionInfo.from_tensor(normal, key=0)
        message = codec.compress(normal, info)
        figures[name] = {
            "bytes": len(message.buffer) / elements,
            "encode": speed(lambda codec=codec, info=info: codec.compress(normal, info), elements, turns),
            "decode": decoding_speed(codec, message, elements, turns),
            "normal": error(codec, normal),
            "outliers": error(codec, outliers),
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
