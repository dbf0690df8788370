"""A model's frozen weights, which nobody trains: equal at all peers of a run, and no part of its state.

    digest = SHA-256("swarm frozen weights 1" + chunk size, and each tensor's name, type and shape, by name, as JSON
                     + the BLAKE3 of all chunks of the flat memory that `state/snapshot.py` lays out)

So whoever knows the digest, and has a model of these shapes, can check the list of hashes that a donor names before it
downloads a byte, and then each chunk by itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from swarmcli.errors import CheckpointError
from swarmcli.files.tensor_file import TensorFile, write_tensors
from swarmcli.state.distant import AnyTensor, fill
from swarmcli.state.snapshot import ChunkLayout, PinnedState, Snapshot, StateOutline

FILE = "frozen-weights.safetensors"
TERM = "frozen_weights"  # the key of the fingerprint under which peers compare digests
_HASH = 32

Parameters = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class FrozenWeights:
    """Those of one model. All methods block for as long as hashing or reading takes, which is seconds for a gigabyte.

    digest  of the run's, in hexadecimal; "": the model has none
    named   whether somebody has said which the run's are; otherwise they are taken to be these
    held    whether this model's are those of the run
    own     the digest of this model's, as last looked at
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], digest: str = "", directory: Path | None = None) -> None:
        """`digest`: of the run's, if these may be others. `directory`: where downloaded ones are kept, and looked for
        now if they are wanted. Raises ValueError for a digest that is none or of nothing."""
        if digest and (not tensors or not re.fullmatch("[0-9a-f]{64}", digest)):
            wrong = (
                f"expected 64 hexadecimal digits, got {digest!r:.80}" if tensors else "the model has no frozen weights"
            )
            raise ValueError(f"frozen_digest: {wrong}")
        self.tensors = {name: tensors[name].detach() for name in sorted(tensors)}
        self.layout = ChunkLayout.of(self.tensors)
        self.directory = directory
        self.own, self.digest, self.named = "", "", bool(digest)
        self._chunks: Sequence[bytes] = ()
        if tensors:
            self.look()
            self.digest = digest or self.own
            if not self.held and directory is not None:
                self._read(directory / FILE)

    @property
    def held(self) -> bool:
        return self.own == self.digest

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def look(self) -> None:
        """Hashes this model's as they are now."""
        self._chunks = _chunks_of(self.tensors)
        self.own = _digest(self.layout, self._chunks)

    def snapshot(self) -> Snapshot:
        """To be handed out, once they are held."""
        return Snapshot(bytes.fromhex(self.digest), b"".join(self._chunks), self.tensors)

    def check(self, outline: StateOutline) -> Sequence[bytes]:
        """The hashes of all chunks that a donor promises. Raises ValueError unless they are those of the run's."""
        if outline.layout != self.layout:
            raise ValueError("its frozen weights have other names, types or shapes than this model's")
        told = outline.metadata if isinstance(outline.metadata, bytes) else b""
        chunks = [told[begin : begin + _HASH] for begin in range(0, len(told), _HASH)]
        if len(chunks) != self.layout.chunks or _digest(self.layout, chunks) != self.digest:
            raise ValueError(f"what it offers are not the run's frozen weights, {self.digest[:16]}…")
        return chunks

    def take(self, contents: Mapping[str, AnyTensor], chunks: Sequence[bytes]) -> None:
        """The model has these from now on, whose hashes have been checked. OSError: they could not be read, and the
        model has a part of them."""
        self.own = ""
        for name, tensor in self.tensors.items():
            fill(tensor, contents[name])
        self.own, self._chunks = self.digest, chunks

    def keep(self) -> None:
        """Where there is a directory they are found in it after a restart. Raises OSError, or TypeError for a type that
        files of this format cannot hold."""
        if self.directory is not None:
            write_tensors(self.directory / FILE, self.tensors)

    def _read(self, file: Path) -> None:
        """Takes what was kept, if it is the run's: it may be of another run, or torn."""
        try:
            with TensorFile(file) as kept:
                found = {name: kept.tensor(name) for name in self.tensors}
                if (
                    ChunkLayout.of(found) == self.layout
                    and _digest(self.layout, chunks := _chunks_of(found)) == self.digest
                ):
                    self.take(found, chunks)
        except (CheckpointError, OSError):
            return


def frozen_of(
    parameters: Sequence[torch.Tensor],
    named: Parameters = (),
    digest: str = "",
    directory: Path | None = None,
    averaged: Sequence[torch.Tensor] = (),
) -> FrozenWeights:
    """Finds a model's frozen weights: the optimizer has these `parameters`, others are `named`, and those that are
    trained are passed over. None may be a view of what is trained, or `averaged`. Raises TypeError or ValueError."""
    found: dict[torch.Tensor, str] = {}
    for index, item in enumerate(named):
        name, tensor = item if isinstance(item, tuple) and len(item) == 2 else (str(index), item)
        if not isinstance(tensor, torch.Tensor) or not isinstance(name, str):
            raise TypeError(f"frozen_parameters: expected tensors, or names and tensors, got {type(tensor).__name__}")
        if not tensor.requires_grad:
            found.setdefault(tensor, name)  # tied ones are one
    for index, parameter in enumerate(parameters):
        if not parameter.requires_grad:
            found.setdefault(parameter, f"parameter/{index}")
    if len(set(found.values())) != len(found):
        raise ValueError("frozen_parameters: two tensors have one name")
    trained = (parameter for parameter in parameters if parameter.requires_grad)
    moving = {each.data_ptr() for each in (*trained, *averaged)} - {0}
    for tensor, name in found.items():
        if tensor.data_ptr() in moving:
            raise ValueError(
                f"frozen_parameters: {name!r:.80} is trained, or averaged as one of extra_tensors; give "
                "model.named_parameters()"
            )
    return FrozenWeights({name: tensor for tensor, name in found.items()}, digest, directory)


def _chunks_of(tensors: Mapping[str, torch.Tensor]) -> list[bytes]:
    pinned = PinnedState(Snapshot(b"", None, tensors))
    return [pinned.digest(chunk) for chunk in range(pinned.layout.chunks)]


def _digest(layout: ChunkLayout, chunks: Sequence[bytes]) -> str:
    forms = [[entry.name, entry.dtype, list(entry.shape)] for entry in layout.entries]
    described = json.dumps([layout.chunk_size, forms], separators=(",", ":")).encode()
    return hashlib.sha256(b"swarm frozen weights 1" + described + b"".join(chunks)).hexdigest()
