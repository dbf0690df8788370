"""The inputs of a reducer's parts, which it keeps until the round is settled: an auditor may ask for them."""

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

IN_MEMORY = 64 << 20  # bytes of inputs of one try; what is more lies in a file without a name

# Who gave it, how it is to be read, and its bytes, or where they lie in the file (begin and length), or None: lost.
_Kept: TypeAlias = tuple[Input, TensorHeader, "memoryview | tuple[int, int] | None"]


class KeptInputs:
    """What each sender has delivered, by the number of the part. Its own inputs a reducer does not keep here: they do
    not change until the round is over."""

    def __init__(self, in_memory: int = IN_MEMORY, directory: Path | None = None) -> None:
        """`directory` is for the file; None: the usual one."""
        self._left, self._directory = in_memory, directory or usual_directory()
        self._kept: defaultdict[int, dict[int, _Kept]] = defaultdict(dict)  # part → sender
        self._file: UnnamedFile | None = None
        self._end = 0
        self._place = Lock()  # whoever holds it takes a piece of the file; parts are kept by several threads

    def memory(self, nbytes: int) -> memoryview | None:
        """Memory for one more part, which `keep` takes as it is; None: it will lie in the file."""
        with self._place:
            if nbytes > self._left:
                return None
            self._left -= nbytes
        return unwritten(nbytes)

    def keep(self, part: int, given: Input, message: TensorMessage, memory: memoryview | None) -> None:
        """`memory`: what `memory` gave for this part, where its payload lies. Takes as long as a disk may, unless there
        is some. Where the disk is full the content is lost: then an auditor gets nothing, and doubts this peer."""
        content: memoryview | tuple[int, int] | None = memory
        if memory is None:
            with suppress(OSError):
                content = self._write(message)
        self._kept[part][given.sender] = given, message.header, content

    def input(self, part: int, sender: int) -> Input:
        """Raises KeyError if it was never kept."""
        return self._kept[part][sender][0]

    def message(self, part: int, sender: int) -> TensorMessage:
        """What a sender delivered. Raises OSError if it was lost, KeyError if it was never kept. Takes as long as a
        disk may."""
        _, header, content = self._kept[part][sender]
        if isinstance(content, memoryview):
            return TensorMessage(header, (content,))
        if content is None or self._file is None:
            raise OSError("what was delivered could not be kept")
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
