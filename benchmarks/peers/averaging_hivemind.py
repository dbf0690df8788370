"""hivemind's side of benchmarks/averaging.py. Runs in .venv-peers: a line on the input begins a turn, the seconds that
it took come out as a line; the end of the input ends it.

    averaging_hivemind.py PEERS BYTES none|float16|state

Each peer is a process of its own. A group of all peers begins as soon as it is full, so the time of a step is what
hivemind needs to find it and to average.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

import hivemind
import torch
from hivemind.compression import Float16Compression, NoCompression


def run_peer(index: int, peers: int, nbytes: int, kind: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dht = hivemind.DHT(initial_peers=pipe.recv(), start=True)
    pipe.send([str(address) for address in dht.get_visible_maddrs()])
    averager = hivemind.DecentralizedAverager(
        [torch.full((nbytes // 16,), float(index)) for _ in range(4)],
        dht,
        prefix="bench",
        target_group_size=peers,
        min_group_size=peers,
        min_matchmaking_time=5.0,
        request_timeout=1.0,
        compression=Float16Compression() if kind == "float16" else NoCompression(),
        start=True,
    )
    while True:
        pipe.recv()
        began = time.perf_counter()
        if kind != "state":
            averager.step(timeout=60)
        elif index:
            assert averager.load_state_from_peers(timeout=60) is not None
        pipe.send(time.perf_counter() - began)


def main(peers: int, nbytes: int, kind: str) -> None:
    pipes, contact = [], []
    for index in range(peers):
        mine, theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=run_peer, args=(index, peers, nbytes, kind, theirs)).start()
        mine.send(contact)
        contact = contact or mine.recv()
        pipes.append(mine)
    for pipe in pipes[1:]:
        pipe.recv()
    time.sleep(2)  # hivemind's averagers look for groups only once they have declared themselves
    print("ready", flush=True)
    for _ in sys.stdin:
        for pipe in pipes:
            pipe.send("go")
        print(json.dumps(max(pipe.recv() for pipe in pipes)), flush=True)


if __name__ == "__main__":
    os.setpgrp()  # peers and their network daemons are one group, which is killed at the end: they take long to leave
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    finally:
        os.killpg(0, signal.SIGKILL)
