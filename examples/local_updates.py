"""Local updates: each peer steps after every batch by itself, and parameters are averaged once per epoch.

    python -m examples.local_updates                              # prints an address
    python -m examples.local_updates --seed 1 --peer tcp://…

For peers that should rarely talk: an epoch costs one exchange of the parameters, however many steps are in it. Between
two averages peers differ, so the result is not that of synchronous training. Batch norm's running statistics get no
gradients; as extra tensors they are averaged like parameters, and a newcomer downloads them.
"""

from __future__ import annotations

from collections.abc import Iterable

import swarmcli

# isort: split
# torch after swarmcli: its threads then sleep while they wait, and leave the cores to other peers.
import torch

from examples.data import CLASSES, FEATURES, clusters
from examples.peers import Say, arguments, invite, run, tell_epochs

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
BATCH = 32


def normalized_classifier() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES)
    )


def make_optimizer(dht: swarmcli.DHT, model: torch.nn.Module) -> swarmcli.Optimizer:
    running = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    return swarmcli.Optimizer(
        dht=dht,
        run_id="local-updates",
        target_batch_size=4096,  # samples of all peers between two averages
        batch_size_per_step=BATCH,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        grad_averager=None,  # this is what makes the updates local
        average_opt_statistics=("exp_avg_sq",),  # Adam's second moments; the first ones stay each peer's own
        extra_tensors=running,
        delay_state_averaging=True,  # the default: training goes on meanwhile
    )


def train(model: torch.nn.Module, data: Batches, peers: list[str], host: str = "127.0.0.1", say: Say = print) -> None:
    with swarmcli.DHT(peers, start=True, host=host) as dht:
        optimizer = make_optimizer(dht, model)
        invite(dht, say)
        tell_epochs(dht, say, every=10)
        try:
            for step, (features, classes) in enumerate(data):
                loss = torch.nn.functional.cross_entropy(model(features), classes)
                loss.backward()
                optimizer.step()  # the optimizer steps at once
                optimizer.zero_grad()
                if step % 1000 == 0:
                    say(f"batch {step}: loss {loss.item():.3f}")
        finally:
            optimizer.shutdown()


if __name__ == "__main__":
    given = arguments(__doc__)
    run(lambda: train(normalized_classifier(), clusters(BATCH, given.batches, given.seed), given.peer, given.host))
