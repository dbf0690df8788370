"""A model's frozen weights, which nobody trains: equal at all peers of a run, and no part of its state.

    digest = SHA-256("swarm frozen weights 1" + chunk size, and each tensor's name, type and shape, by name, as JSON
                     + the BLAKE3 of all chunks of the flat memory that `state/snapshot.py` lays out)

So a peer that knows the digest, and has a model of these shapes, can check the list of hashes that a donor names before
it downloads a byte, and then each chunk by itself.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from swarmcli.errors import CheckpointError
from swarmcli.files.tensor_file import TensorFile, mapped, write_tensors
from swarmcli.state.distant import AnyTensor, fill, loaded
from swarmcli.state.snapshot import ChunkLayout, PinnedState, Snapshot, StateOutline

FILE = "frozen-weights.safetensors"
TERM = "frozen_weights"  # the key of the fingerprint under which peers compare digests

Parameters = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class FrozenWeights:
    """The frozen weights of one model. Methods block while they hash or read, for seconds per gigabyte.

    digest  of the run's frozen weights, in hexadecimal; "": the model has none
    named   whether somebody has named that digest; otherwise it is that of this model's weights
    held    whether this model's frozen weights are the run's
    own     the digest of this model's, as of the last look; "": they are being replaced, or torn
    base    if nobody has said what is frozen: what `base_of` finds. Peers compare it, and never download it
    """

    may_be_absent = False  # whether a model can lack them until it gets the run's

    def __init__(self, tensors: Mapping[str, torch.Tensor], digest: str = "", directory: Path | None = None) -> None:
        """`tensors`: name → this model's weight. `digest`: of the run's, if this model's may be others; "": they are
        the run's. `directory`: keeps downloaded ones; they are read from there now if this model has others. Raises
        ValueError for a digest that is none, or for a model without frozen weights."""
        found = bool(tensors) or self.may_be_absent
        if digest and (not found or not re.fullmatch("[0-9a-f]{64}", digest)):
            wrong = (
                f"expected 64 hexadecimal digits, got {digest!r:.80}" if found else "the model has no frozen weights"
            )
            raise ValueError(f"frozen_digest: {wrong}")
        self.tensors = {name: tensors[name].detach() for name in sorted(tensors)}
        self.layout = ChunkLayout.of(self.tensors)
        self.directory = directory
        self.own, self.digest, self.base, self.named = "", "", "", bool(digest)
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
    def told(self) -> str:
        """What the report has: the digest that others compare with theirs; "": there is nothing to compare."""
        return self.digest or self.base

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def look(self) -> None:
        """Hashes this model's frozen weights as they are now."""
        self._chunks = _chunks_of(self.tensors)
        self.own = _digest(self.layout, self._chunks)

    def snapshot(self) -> Snapshot:
        """What this peer hands out. Only once the run's are `held`."""
        return Snapshot(bytes.fromhex(self.digest), None, self.tensors, digests=self._chunks)

    def check(self, outline: StateOutline) -> None:
        """Raises ValueError unless the hashes of chunks in a donor's outline are those of the run's frozen weights."""
        if outline.layout != self.layout:
            raise ValueError("its frozen weights have other names, types or shapes than this model's")
        if _digest(self.layout, outline.digests) != self.digest:
            raise ValueError(f"what it offers are not the run's frozen weights, {self.digest[:16]}…")

    def take(self, contents: Mapping[str, AnyTensor], chunks: Sequence[bytes]) -> None:
        """Puts weights, whose hashes have been checked, into the model. Raises OSError if they could not be read: then
        the model has a part of them."""
        self.own = ""
        for name, tensor in self.tensors.items():
            fill(tensor, contents[name])
        self.own, self._chunks = self.digest, chunks

    def keep(self) -> None:
        """Writes them to the directory, if there is one, for the next start. Raises OSError, or TypeError for a type
        that files of this format cannot hold."""
        if self.directory is not None:
            write_tensors(self.directory / FILE, self.tensors)

    def _read(self, file: Path) -> None:
        """Takes what the file holds, if it is the run's: it may be another run's, or torn."""
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


class StoredWeights(FrozenWeights):
    """The frozen weights of a model that holds them in another form, quantized for example, than the run's files do.
    Here they are views of those files, with their names, and others get them in that form."""

    may_be_absent = True

    def __init__(
        self,
        stored: Callable[[], Mapping[str, torch.Tensor]],
        digest: str,
        directory: Path | None,
        load: Callable[[Mapping[str, torch.Tensor]], object],
        most: int,
    ) -> None:
        """`stored` returns views of the files from which the model was loaded; {}: there are none. `load` brings other
        weights into the model. `most`: bytes that this computer would download, to `directory`."""
        self._stored, self._load, self._most = stored, load, most
        super().__init__(stored(), digest, directory)

    @property
    def nbytes(self) -> int:
        return super().nbytes or self._most

    def look(self) -> None:
        if not self.own:  # the files do not change
            super().look()
            self._map(self._stored())

    def check(self, outline: StateOutline) -> None:
        if self.directory is None:
            raise ValueError("your limit for the disk leaves no room for them; `swarm limits set disk=…` changes that")
        if not outline.exact or outline.layout.nbytes > self._most:
            raise ValueError(f"its frozen weights take more than {self._most >> 20} MiB, or came through a codec")
        self.layout = outline.layout  # the digest is over that, too
        super().check(outline)

    def take(self, contents: Mapping[str, AnyTensor], chunks: Sequence[bytes]) -> None:
        """Writes the weights to the directory, and brings them into the model from there."""
        assert self.directory is not None
        write_tensors(self.directory / FILE, contents, load=loaded)
        self._use(self.directory / FILE, chunks)

    def keep(self) -> None:
        """Nothing to do: `take` has written them."""

    def _read(self, file: Path) -> None:
        with suppress(CheckpointError):
            found = mapped(file)
            chunks = _chunks_of(found)
            if _digest(ChunkLayout.of(found), chunks) == self.digest:
                self._use(file, chunks)

    def _use(self, file: Path, chunks: Sequence[bytes]) -> None:
        self.own = ""
        self._load(mapped(file))
        self._map(mapped(file))
        self.own, self._chunks = self.digest, chunks

    def _map(self, fresh: Mapping[str, torch.Tensor]) -> None:
        # Pages that were read count as memory of this process while they are mapped: this lets go of the old ones.
        self.tensors, self.layout = {name: fresh[name] for name in sorted(fresh)}, ChunkLayout.of(fresh)


def frozen_of(
    parameters: Sequence[torch.Tensor],
    named: Parameters = (),
    digest: str = "",
    directory: Path | None = None,
    averaged: Sequence[torch.Tensor] = (),
) -> FrozenWeights:
    """Finds a model's frozen weights: those of the optimizer's `parameters` and of the `named` ones that nobody trains.
    Raises TypeError or ValueError, as for one that is a view of a trained or `averaged` tensor."""
    found: dict[torch.Tensor, str] = {}
    for index, item in enumerate(named):
        name, tensor = item if isinstance(item, tuple) and len(item) == 2 else (str(index), item)
        if not isinstance(tensor, torch.Tensor) or not isinstance(name, str):
            raise TypeError(f"frozen_parameters: expected tensors, or names and tensors, got {type(tensor).__name__}")
        if not tensor.requires_grad:
            found.setdefault(tensor, name)  # tied weights count once
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


def base_of(parameters: Sequence[torch.Tensor]) -> str:
    """A digest, in hexadecimal, of what is frozen in the modules of this process that have some of these parameters;
    "": nothing is. It is made from some values of each tensor, whatever its name and floating type."""
    trained, found = set(map(id, parameters)), dict[int, torch.Tensor]()
    for each in gc.get_objects():
        if issubclass(type(each), torch.nn.Module) and "_parameters" in vars(each):
            own = {id(parameter): parameter for parameter in each.parameters()}
            if trained & own.keys():
                found |= {place: its for place, its in own.items() if not (its.requires_grad or its.is_meta)}
    hashes = []
    for tensor in found.values():
        with suppress(RuntimeError, TypeError, NotImplementedError):  # a kind of tensor whose values cannot be read
            taken = tensor.detach().flatten()[:: max(1, tensor.numel() // 1024)].cpu()
            values = (taken.bfloat16() if taken.is_floating_point() else taken).contiguous().view(torch.uint8)
            hashes.append(hashlib.sha256(repr(tuple(tensor.shape)).encode() + values.numpy().tobytes()).digest())
    return hashlib.sha256(b"".join(sorted(hashes))).hexdigest() if hashes else ""


def _chunks_of(tensors: Mapping[str, torch.Tensor]) -> Sequence[bytes]:
    return PinnedState(Snapshot(b"", None, tensors)).digests


def _digest(layout: ChunkLayout, chunks: Sequence[bytes]) -> str:
    forms = [[entry.name, entry.dtype, list(entry.shape)] for entry in layout.entries]
    described = json.dumps([layout.chunk_size, forms], separators=(",", ":")).encode()
    return hashlib.sha256(b"swarm frozen weights 1" + described + b"".join(chunks)).hexdigest()
