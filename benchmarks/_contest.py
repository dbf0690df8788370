"""Contestants that take turns: each is a crew of processes that does one piece of work whenever it is told to."""

from __future__ import annotations

import json
import multiprocessing
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any, Protocol

import swarmcli

PATIENCE = 120.0  # seconds for one turn
REST = 1.0  # seconds before each turn: some contestants are busy for a while after theirs


@dataclass(frozen=True)
class Turn:
    """One piece of work: the seconds of its slowest process, and the mean processor seconds of its processes."""

    seconds: float
    processor: float | None = None


class Contestant(Protocol):
    def turn(self) -> Turn: ...
    def end(self) -> None: ...


class Crew:
    """Python processes, each of which runs `target(pipe, index, *arguments)`. A target sends one message, receives the
    list of all processes' messages, and then answers each "go": with (seconds, processor seconds) where `turn` is
    called."""

    def __init__(self, target: Callable[..., None], count: int, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Pipe] = []
        self._processes = []
        for index in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, index, *arguments), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        known = [self._hear(pipe) for pipe in self._pipes]
        self._tell(known)

    def ask(self, patience: float = PATIENCE) -> list[Any]:
        """Returns each process's answer to "go". Raises TimeoutError if one has not answered within `patience`
        seconds."""
        self._tell("go")
        return [self._hear(pipe, patience) for pipe in self._pipes]

    def turn(self) -> Turn:
        seconds, processor = zip(*self.ask(), strict=True)
        return Turn(max(seconds), statistics.fmean(processor))

    def end(self) -> None:
        """Kills the processes: nothing more is wanted of them, and some take half a minute to leave."""
        for process in self._processes:
            process.kill()
            process.join()

    def _tell(self, message: Any) -> None:
        for pipe in self._pipes:
            pipe.send(message)

    def _hear(self, pipe: Pipe, patience: float = PATIENCE) -> Any:
        if not pipe.poll(patience):
            raise TimeoutError(f"no word within {patience:.0f} s")
        return pipe.recv()


class Script:
    """A program in another environment: a line on its input begins a turn, a line of JSON on its output ends it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._line()

    def turn(self) -> Turn:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return Turn(float(json.loads(self._line())))

    def end(self) -> None:
        """Ends its input, upon which it kills its own processes."""
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the other program ended early")
        return line


def processor_seconds() -> float:
    """Processor seconds of all threads of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve_turns(pipe: Pipe, work: Callable[[], None]) -> None:
    """Does `work` at each message, and answers with its seconds and processor seconds. Returns once the other end is
    closed."""
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        used, began = processor_seconds(), time.perf_counter()
        work()
        pipe.send((time.perf_counter() - began, processor_seconds() - used))


def join_dht(pipe: Pipe, index: int) -> swarmcli.DHT:
    """Returns the DHT of a crew's process: all but the first process join the first one's."""
    place = swarmcli.DHT(start=True, host="127.0.0.1") if index == 0 else None
    pipe.send(place.get_visible_addresses()[0] if place else None)
    known = pipe.recv()
    return place or swarmcli.DHT(known[:1], start=True, host="127.0.0.1")


def compete(contestants: dict[str, Contestant], turns: int) -> dict[str, list[Turn]]:
    """Returns each contestant's turns. They take turns one after the other, so that other work on the machine disturbs
    all alike. The first turn of each is not counted."""
    counted: dict[str, list[Turn]] = {name: [] for name in contestants}
    for number in range(turns + 1):
        for name, contestant in contestants.items():
            time.sleep(REST)
            turn = contestant.turn()
            if number:
                counted[name].append(turn)
    return counted


def ratio(ours: Sequence[Turn], theirs: Sequence[Turn]) -> float:
    """The median over the turns of our seconds divided by theirs."""
    return statistics.median(a.seconds / b.seconds for a, b in zip(ours, theirs, strict=True))
