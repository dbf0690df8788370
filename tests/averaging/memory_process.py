"""One peer of a round in a process of its own, which tells how much memory the round took at its peak.

    python -m tests.averaging.memory_process MIB PREFIX CODEC ROUNDS [ADDRESS ...]

Prints its address, averages ROUNDS times, prints a line of JSON and waits for the end of its standard input.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch

import swarmcli
from swarmcli.compression import codec_named

MIB = 1 << 20


def main() -> None:
    size, prefix, codec, rounds, *contacts = sys.argv[1:]
    torch.set_num_threads(1)
    with swarmcli.DHT(contacts, start=True, host="127.0.0.1") as dht:
        print(dht.get_visible_addresses()[0], flush=True)
        tensors = [torch.ones(int(size) * MIB // 8) for _ in range(2)]
        _average([torch.ones(1000)], 1, dht, f"{prefix}-first", codec)  # loads what is loaded once
        before = _resident()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        members = _average(tensors, int(rounds), dht, prefix, codec)
        print(json.dumps({"peak": _peak() - before, "members": members}), flush=True)
        sys.stdin.read()


def _average(tensors: list[torch.Tensor], rounds: int, dht: swarmcli.DHT, prefix: str, codec: str) -> list[int]:
    """How many members each round had; 0 for one that failed."""
    with swarmcli.DecentralizedAverager(
        tensors, dht, start=True, prefix=prefix, compression=codec_named(codec), min_matchmaking_time=30
    ) as averager:
        return [len(averager.step(timeout=60) or ()) for _ in range(rounds)]


def _resident() -> int:
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
