"""A trainer of this project in benchmarks/wall.py: `python -m benchmarks._wall_trainer WORK`."""

from __future__ import annotations

import os
from typing import Any

import torch

import swarmcli
from benchmarks._wall import ByteGPT, Work, meet, train
from swarmcli.compression import BlockwiseQuantization
from swarmcli.training.muon import MuonWithAdamW

PLAIN_MEANS = swarmcli.Outer(8)
FOUR = BlockwiseQuantization(64, bits=4)
WAYS: dict[str, dict[str, Any]] = {
    "synchronous, float32": {},
    "synchronous, 4 bits": {"grad_compression": FOUR, "delay_grad_averaging": True},
    "PowerSGD": {"grad_averager": swarmcli.PowerSGDGradientAverager.get_factory(averager_rank=4)},
    "outer steps, 4 bits": {"outer": PLAIN_MEANS, "grad_compression": FOUR, "delay_grad_averaging": True},
    "outer steps with Muon, 4 bits": {"outer": PLAIN_MEANS, "grad_compression": FOUR, "delay_grad_averaging": True},
}


def optimizer_of(model: ByteGPT, way: str, rate: float) -> torch.optim.Optimizer:
    if "Muon" not in way:
        return torch.optim.AdamW(model.parameters(), rate, (0.9, 0.95), weight_decay=0.0)
    inside = [parameter for parameter in model.layers.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if all(parameter is not each for each in inside)]
    groups = [{"params": inside, "by_muon": True}, {"params": others, "by_muon": False}]
    return MuonWithAdamW(groups, rate, betas=(0.9, 0.95), eps=1e-8, momentum=0.95, nesterov=True, ns_steps=5)


def main(work: Work) -> None:
    torch.set_num_threads(1)
    first = swarmcli.DHT(start=True, host=work.host) if work.index == 0 else None
    known = meet(work, "contact", first.get_visible_addresses() if first else [])
    dht = first or swarmcli.DHT(known[0][:1], start=True, host=work.host)
    model = ByteGPT()
    optimizer = swarmcli.Optimizer(
        dht=dht, run_id="wall", target_batch_size=work.target, batch_size_per_step=8, averaging_timeout=600.0,
        optimizer=optimizer_of(model, work.way, work.rate), **WAYS[work.way],
    )  # fmt: skip
    optimizer.load_state_from_peers()
    train(optimizer, model, work)
    os._exit(0)  # nothing depends on a goodbye here


if __name__ == "__main__":
    main(Work.read())
