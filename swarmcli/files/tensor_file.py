"""safetensors files, written tensor by tensor and read lazily.

    8 bytes     length of the header, little-endian
    header      JSON: name → {dtype, shape, data_offsets}, padded with spaces to a multiple of 8
    data        the tensors one after the other, without holes

safetensors' own writer needs all bytes in host memory at once; this one copies tensors there one at a time. The
safetensors library reads the files, as views of memory-mapped pages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from swarmcli.errors import CheckpointError
from swarmcli.files.durable import write_file

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_ALIGNMENT = 8


def write_tensors(
    file: Path,
    tensors: Mapping[str, Any],
    *,
    digest: Any = None,
    load: Callable[[Any], Tensor] = lambda tensor: tensor,
) -> None:
    """Writes the tensors (any device, any strides, sharing memory or not). `digest`: a hash of hashlib for the whole
    file. Values may stand for tensors elsewhere: with `dtype`, `shape` and `nbytes`; `load` then fetches each tensor
    just before it is written.

    The file appears whole or not at all. Raises OSError, and TypeError for a dtype that the format does not have.
    """
    largest_items_first = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)  # keeps them aligned
    ordered = dict(largest_items_first)
    header = _header(ordered)

    def fill(stream: BinaryIO) -> None:
        stream.write(len(header).to_bytes(8, "little"))
        stream.write(header)
        for tensor in ordered.values():
            stream.write(_bytes_of(load(tensor)))

    write_file(file, fill, digest=digest)


class TensorFile:
    """An open safetensors file. Tensors are read when they are used; a context manager.

    Raises CheckpointError for a file that is missing, truncated or no safetensors file.
    """

    def __init__(self, file: Path) -> None:
        self.path = file
        try:
            self._file: Any = safe_open(str(file), framework="pt").__enter__()
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing") from None
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} is truncated or damaged: {error}") from error
        self.names = frozenset(self._file.keys())
        # Tells a shard of a former version from other files of the same name.
        self.mark: str = (self._file.metadata() or {}).get("mark", "")

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def tensor(self, name: str) -> Tensor:
        """A view of the file's memory-mapped pages; they are read when they are used. Raises CheckpointError."""
        if name not in self.names:
            raise CheckpointError(f"{self.path} is damaged: it has no tensor {name}")
        found: Tensor = self._file.get_tensor(name)
        return found


def mapped(file: Path) -> dict[str, Tensor]:
    """All tensors of a file, by name, as views of its pages. Raises CheckpointError."""
    with TensorFile(file) as opened:
        return {name: opened.tensor(name) for name in sorted(opened.names)}


def digest_of(tensor: Tensor) -> bytes:
    """SHA-256 of a tensor's type, shape and bytes."""
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    found.update(_bytes_of(tensor))
    return found.digest()


def _header(tensors: Mapping[str, Any]) -> bytes:
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name} is {tensor.dtype}, which safetensors files cannot hold")
        described[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    header = json.dumps(described, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % _ALIGNMENT)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
