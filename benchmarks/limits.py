"""Whether a peer keeps to the rates that its user allows, counted on its link.

Two peers behind links of 100 Mbit/s (network namespaces; see _namespaces.py) average a large vector. One of them is
limited, first in what it sends, then, while the round goes on, in what it receives. What counts is what the system saw
on the link in ten seconds, with the headers of Ethernet, IP and TCP. Exits with 1 where that misses the limit by more
than a tenth.

    python -m benchmarks.limits
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from multiprocessing.connection import Connection as Pipe

import swarmcli
from benchmarks import _namespaces as namespaces
from benchmarks.links import Swarm, averager_behind

LIMIT = 1e6  # bytes per second
NBYTES = 40 << 20  # of the vector: a round lasts longer than both stretches
LINK = 100.0  # Mbit/s
SETTLING, SECONDS = 3.0, 10.0
ALLOWED = 0.1  # of the limit


def run_peer(pipe: Pipe, index: int, mbit: float, nbytes: int, peers: int) -> None:
    averager = averager_behind(pipe, index, mbit, nbytes, peers, None)
    if index == 0:
        averager.dht.limit_rates(LIMIT, None)
    pipe.recv()
    control = averager.step(wait=False, timeout=600)
    assert control is not None
    if index == 0:
        pipe.send(measure(averager, f"up{index}"))
    time.sleep(600)  # until it is killed


def measure(averager: swarmcli.DecentralizedAverager, device: str) -> tuple[float, float]:
    """Returns the bytes per second sent while sending is limited, and those received while receiving is."""
    sent = passing(device, "tx")
    averager.dht.limit_rates(None, LIMIT)
    return sent, passing(device, "rx")


def passing(device: str, direction: str) -> float:
    time.sleep(SETTLING)
    before, began = passed(device, direction), time.monotonic()
    time.sleep(SECONDS)
    return (passed(device, direction) - before) / (time.monotonic() - began)


def passed(device: str, direction: str) -> int:
    """Bytes on this process's end of the link so far."""
    said = subprocess.run(["ip", "-s", "-j", "link", "show", device], check=True, capture_output=True).stdout
    return int(json.loads(said)[0]["stats64"][direction]["bytes"])


def compare() -> int:
    swarm = Swarm(run_peer, [LINK] * 2, NBYTES, 2)
    swarm.tell("go")
    seen = dict(zip(("upload", "download"), swarm.pipes[0].recv(), strict=True))
    swarm.kill()
    for way, rate in seen.items():
        print(f"  {way}: {rate / 1e3:.0f} kB/s on the link, limited to {LIMIT / 1e3:.0f}", flush=True)
    return int(any(abs(rate / LIMIT - 1) > ALLOWED for rate in seen.values()))


def main() -> int:
    if namespaces.inside():
        return compare()
    if not namespaces.permitted():
        print("  left out: this system does not allow namespaces with shaped links")
        return 0
    return namespaces.rerun_inside("benchmarks.limits", [])


if __name__ == "__main__":
    sys.exit(main())
