"""A plain PyTorch loop in which strangers train together. Five lines, numbered, make it collaborative.

    python -m examples.plain_loop                                 # prints an address
    python -m examples.plain_loop --seed 1 --peer tcp://…         # in another terminal, with that address

Each peer trains until Ctrl-C, or for --batches; when it leaves, the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable

import swarmcli  # 1

# isort: split
# torch after swarmcli: its threads then sleep while they wait, and leave the cores to other peers.
import torch

from examples.data import classifier, clusters
from examples.peers import Say, arguments, invite, run, tell_epochs

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
BATCH = 32


def train(model: torch.nn.Module, data: Batches, peers: list[str], host: str = "127.0.0.1", say: Say = print) -> None:
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dht = swarmcli.DHT(peers, start=True, host=host)  # 2
    optimizer = swarmcli.Optimizer(  # 3
        dht=dht, run_id="plain-loop", target_batch_size=4096, batch_size_per_step=BATCH, optimizer=optimizer
    )
    invite(dht, say)  # these two only tell people what happens
    tell_epochs(dht, say, every=10)
    try:
        for step, (features, classes) in enumerate(data):
            loss = torch.nn.functional.cross_entropy(model(features), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 1000 == 0:
                say(f"batch {step}: loss {loss.item():.3f}")
    finally:
        optimizer.shutdown()  # 4
        dht.shutdown()  # 5


if __name__ == "__main__":
    given = arguments(__doc__)
    run(lambda: train(classifier(), clusters(BATCH, given.batches, given.seed), given.peer, given.host))
