"""Processes behind links of a given speed: network namespaces with a token bucket (tbf) each way, on one machine.

The benchmark runs inside a user namespace of its own (`unshare -Urn`), where it may make what it likes; nothing of it
is left when it ends. Every peer takes a network namespace for itself, and gets one end of a veth pair whose other end
hangs on a bridge: what it sends is shaped at its own end, what it receives at the bridge.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_INSIDE = "BENCHMARK_INSIDE_NAMESPACE"
# Frames of 1500 bytes carry 1448 of a stream and take 1514 of the link.
PAYLOAD = 1448 / 1514
QUEUE = 50  # milliseconds, as in a home router that is not too bad
BURST = 64  # kB


def inside() -> bool:
    return _INSIDE in os.environ


def permitted() -> bool:
    """Whether this system lets us make namespaces with shaped links."""
    shaped = "tc qdisc add dev left root tbf rate 1mbit burst 64kb latency 50ms"
    probe = f"ip link add name left type veth peer name right && {shaped}"
    try:
        return subprocess.run(["unshare", "-Urn", "sh", "-c", probe], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def rerun_inside(module: str, arguments: Sequence[str]) -> int:
    """Runs a benchmark again, in a namespace where it may make links."""
    command = ["unshare", "-Urn", sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env={**os.environ, _INSIDE: "1"}, check=False).returncode


def make_bridge() -> None:
    _run("ip link add name bridge type bridge")
    _run("ip link set bridge up")


def connect(process: int, index: int, mbit: float, queue: int = QUEUE) -> None:
    """Gives a process, which has called `isolate`, its link. Called by the parent."""
    _run(f"ip link add name up{index} type veth peer name down{index}")
    _run(f"ip link set up{index} netns {process}")
    _run(f"ip link set down{index} master bridge up")
    _run(shaping(f"down{index}", mbit, queue))


def isolate() -> None:
    """Takes a network namespace for this process, before it has any other thread that matters."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def configure(index: int, mbit: float, queue: int = QUEUE) -> str:
    """Brings this process's end of the link up; returns its address."""
    address = f"10.9.0.{index + 1}"
    _run("ip link set lo up")
    _run(f"ip addr add {address}/24 dev up{index}")
    _run(f"ip link set up{index} up")
    _run(shaping(f"up{index}", mbit, queue))
    return address


def settle(pipe: Pipe, index: int, mbit: float, queue: int = QUEUE) -> str:
    """The peer's part of being connected: `isolate`, wait for the parent, `configure`. Returns the address."""
    isolate()
    pipe.send(os.getpid())
    pipe.recv()
    return configure(index, mbit, queue)


def shaping(device: str, mbit: float, queue: int = QUEUE, burst: int = BURST) -> str:
    """Returns the command that limits what a device sends. `queue`: milliseconds that a packet may wait; `burst`: kB
    that pass at once after a rest."""
    return f"tc qdisc replace dev {device} root tbf rate {mbit}mbit burst {burst}kb latency {queue}ms"


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)
