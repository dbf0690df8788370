"""hivemind's side of benchmarks/optimizer.py. Runs in .venv-peers; prints its trainers' epochs as one line of JSON.

optimizer_hivemind.py WORK      a benchmarks._training.Work as JSON
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import hivemind

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks._training import Work, begin_process, parameters_of, torch_optimizer, train


def run_peer(work: Work, pipe: Connection) -> None:
    begin_process()
    dht = hivemind.DHT(initial_peers=pipe.recv(), start=True)
    pipe.send([str(address) for address in dht.get_visible_maddrs()])
    parameters, compute = parameters_of(work.model)
    options = {} if work.matchmaking_time is None else {"matchmaking_time": work.matchmaking_time}
    if work.rank is not None:
        from functools import partial

        from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

        options["grad_averager_factory"] = partial(PowerSGDGradientAverager, averager_rank=work.rank)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="bench",
        target_batch_size=work.target,
        batch_size_per_step=work.batch_size,
        optimizer=torch_optimizer(parameters),
        **options,
    )
    pipe.send("ready")
    pipe.recv()
    pipe.send([asdict(epoch) for epoch in train(optimizer, compute, work)])
    pipe.recv()


def main(work: Work) -> None:
    pipes, contact = [], []
    for _ in range(work.peers):
        mine, theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=run_peer, args=(work, theirs)).start()
        mine.send(contact)
        contact = contact or mine.recv()
        pipes.append(mine)
    for index, pipe in enumerate(pipes):
        if index:
            pipe.recv()
        pipe.recv()
    for pipe in pipes:
        pipe.send("go")
    print(json.dumps([pipe.recv() for pipe in pipes]), flush=True)


if __name__ == "__main__":
    os.setpgrp()  # peers and their network daemons are one group, which is killed at the end: they take long to leave
    try:
        main(Work(**json.loads(sys.argv[1])))
    finally:
        os.killpg(0, signal.SIGKILL)
