"""The inputs of a reducer's parts, which the reducer keeps until the round is settled: auditors may ask for them."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TypeAlias

from swarmcli.averaging.audit.signed import Input
from swarmcli.compression import TensorHeader, TensorMessage
from swarmcli.memory import unwritten
from swarmcli.state.unnamed_file import UnnamedFile, usual_directory

# The input with its sender, the header to read it by, and its bytes, or their place in the file (begin and length), or
# None: lost.
_Kept: TypeAlias = tuple[Input, TensorHeader, "memoryview | tuple[int, int] | None"]


class KeptInputs:
    """The parts of each sender, by the number of the part. The reducer's own inputs are among them."""

    def __init__(self, in_memory: int = 64 << 20, directory: Path | None = None) -> None:
        """`in_memory`: bytes of inputs of one try; the others lie in a file without a name. `directory` is for the
        file; None: the usual one."""
        self._left, self._directory = in_memory, directory or usual_directory()
        self._kept: defaultdict[int, dict[int, _Kept]] = defaultdict(dict)  # part → sender
        self._file: UnnamedFile | None = None
        self._end = 0
        self._place = Lock()  # its holder takes a piece of the file; several threads keep parts

    def memory(self, nbytes: int) -> memoryview | None:
        """Memory for one more part, which `keep` takes as it is; None: the part will lie in the file."""
        with self._place:
            if nbytes > self._left:
                return None
            self._left -= nbytes
        return unwritten(nbytes)

    def keep(self, part: int, given: Input, message: TensorMessage, memory: memoryview | None) -> None:
        """`memory`: the result of `memory` for this part, where its payload lies. Without memory it takes as long as
        the disk. If the disk is full, the content is lost: then an auditor gets nothing, and doubts this peer."""
        content: memoryview | tuple[int, int] | None = memory
        if memory is None:
            with suppress(OSError):
                content = self._write(message)
        self._kept[part][given.sender] = given, message.header, content

    def input(self, part: int, sender: int) -> Input:
        """Raises KeyError if it was never kept."""
        return self._kept[part][sender][0]

    def message(self, part: int, sender: int) -> TensorMessage:
        """The part of a sender. Raises OSError if it was lost, KeyError if it was never kept. Takes as long as the
        disk."""
        _, header, content = self._kept[part][sender]
        if isinstance(content, memoryview):
            return TensorMessage(header, (content,))
        if content is None or self._file is None:
            raise OSError("the part could not be kept")
        return TensorMessage(header, (self._file.read(*content),))

    def close(self) -> None:
        """Lets go of everything. Idempotent."""
        self._kept.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, message: TensorMessage) -> tuple[int, int]:
        """Where it lies in the file. Raises OSError."""
        nbytes = message.payload_size
        with self._place:
            if self._file is None:
                self._file = UnnamedFile(self._directory)
            begin, self._end = self._end, self._end + nbytes
            self._file.resize(self._end)
        offset = begin
        for piece in message.payload:
            view = memoryview(piece).cast("B")
            self._file.write(offset, view)
            offset += view.nbytes
        return begin, nbytes
