"""hivemind's trainer in benchmarks/wall.py. Runs in .venv-peers: wall_hivemind.py WORK"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import hivemind
import torch
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks._wall import BATCH, ByteGPT, Work, meet, train


def main(work: Work) -> None:
    torch.set_num_threads(1)
    listen = [f"/ip4/{work.host}/tcp/0"]
    first = hivemind.DHT(host_maddrs=listen, start=True) if work.index == 0 else None
    known = meet(work, "contact", [str(each) for each in first.get_visible_maddrs()] if first else [])
    dht = first or hivemind.DHT(initial_peers=known[0], host_maddrs=listen, start=True)
    model = ByteGPT()
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="wall",
        target_batch_size=work.target,
        batch_size_per_step=BATCH,
        optimizer=torch.optim.AdamW(model.parameters(), work.rate, (0.9, 0.95), weight_decay=0.0),
        matchmaking_time=3.0,
        averaging_timeout=600.0,
        grad_averager_factory=partial(PowerSGDGradientAverager, averager_rank=4),
    )
    train(optimizer, model, work)


if __name__ == "__main__":
    try:
        main(Work.read())
    finally:
        os.killpg(0, signal.SIGKILL)  # its network daemon too
