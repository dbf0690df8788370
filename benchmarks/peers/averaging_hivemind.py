"""hivemind's side of benchmarks/averaging.py: prints the seconds as one line of JSON. Runs in .venv-peers.

Each peer is a process of its own. A group of all peers begins as soon as it is full, so the time of a step is what
hivemind needs to find it and to average.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection

import hivemind
import torch
from hivemind.compression import Float16Compression, NoCompression


def run_peer(index: int, peers: int, nbytes: int, codec: str, rounds: int, pipe: Connection) -> None:
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
        compression=Float16Compression() if codec == "float16" else NoCompression(),
        start=True,
    )
    for _ in range(rounds + 1):
        pipe.recv()
        began = time.perf_counter()
        averager.step(timeout=60)
        pipe.send(time.perf_counter() - began)
        with averager.get_tensors() as tensors:
            assert abs(tensors[0][0].item() - (peers - 1) / 2) < 1e-2
    pipe.recv()
    averager.shutdown()
    dht.shutdown()


def main(peers: int, nbytes: int, codec: str, rounds: int) -> None:
    pipes, processes, contact = [], [], []
    for index in range(peers):
        mine, theirs = multiprocessing.Pipe()
        process = multiprocessing.Process(target=run_peer, args=(index, peers, nbytes, codec, rounds, theirs))
        process.start()
        mine.send(contact)
        contact = contact or mine.recv()
        pipes.append(mine)
        processes.append(process)
    for pipe in pipes[1:]:
        pipe.recv()
    time.sleep(2)  # hivemind's averagers look for groups only once they have declared themselves
    times = []
    for _ in range(rounds + 1):
        for pipe in pipes:
            pipe.send("go")
        times.append(max(pipe.recv() for pipe in pipes))
    for pipe in pipes:
        pipe.send("end")
    for process in processes:
        process.join(20)
        process.kill()
    print(json.dumps({"seconds": statistics.median(times[1:]), "all": times}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
