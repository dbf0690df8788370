"""Every mode through the public class: two trainers in threads over TCP, with an auxiliary that helps them."""

import threading
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch

from swarmcli.compression import Float16Compression
from swarmcli.dht import DHT
from swarmcli.events import RoundFinished
from swarmcli.optim import Optimizer, PowerEFGradientAverager
from tests.optim.shells import at_once, dhts

EPOCHS, TARGET, BATCH = 2, 32, 4
IN_PLACE = {"offload_optimizer": False}
MODES: dict[str, dict[str, Any]] = {
    "reused buffers, compressed, in client mode": IN_PLACE
    | {"reuse_grad_buffers": True, "grad_compression": Float16Compression(), "client_mode": True},
    "poweref delayed": {
        "grad_averager": PowerEFGradientAverager.get_factory(averager_rank=2),
        "delay_grad_averaging": True,
    },
    "local updates offloaded, in the background": {"grad_averager": None},
    "states compressed": IN_PLACE
    | {
        "average_state_every": 1,
        "average_opt_statistics": ("exp_avg_sq",),
        "delay_state_averaging": False,
        "state_averaging_compression": Float16Compression(),
    },
}


def make_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 6)).double()


def collaborate(dht: DHT, net: torch.nn.Module, **options: Any) -> Optimizer:
    return Optimizer(
        dht=dht,
        run_id="modes",
        target_batch_size=TARGET,
        optimizer=partial(torch.optim.AdamW, lr=0.02),
        params=net.parameters(),
        scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda epoch: 1 / (1 + 0.1 * epoch)),
        **options,
    )


def samples(seed: int) -> torch.Tensor:
    return torch.randn(BATCH, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loss_of(net: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return ((net(rows) - rows) ** 2).mean()


def train(net: torch.nn.Module, opt: Optimizer, seed: int) -> None:
    """The loop of anyone's script."""
    while opt.local_epoch < EPOCHS:
        if not opt.mode.reuse_grad_buffers:
            opt.zero_grad()
        seed += 2
        loss_of(net, samples(seed)).backward()
        opt.step(batch_size=BATCH)
    opt.state_dict()  # waits for what is under way, so that the model has it


@pytest.mark.parametrize("mode", MODES)
def test_trainers_learn_together_and_an_auxiliary_helps(mode: str) -> None:
    options = MODES[mode]
    with dhts(3) as (first, second, third), ExitStack() as stack:
        nets = [make_model(seed) for seed in (1, 2)]
        opts = [collaborate(dht, net, **options) for dht, net in zip((first, second), nets, strict=True)]
        outline = make_model(3).to("meta")  # of which an auxiliary needs no more than the shapes
        helper = collaborate(third, outline, auxiliary=True, **{**options, "client_mode": None})
        for opt in (*opts, helper):
            stack.callback(opt.shutdown)
        over = threading.Event()
        rounds: list[RoundFinished] = []
        third.events.subscribe(lambda event: rounds.append(event) if isinstance(event, RoundFinished) else None)
        at_once(*(opt.load_state_from_peers for opt in opts))
        assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
        before = loss_of(nets[0], samples(0)).item()
        while not int(helper.report().lineage, 16):
            helper.step()  # until it has heard of the trainers

        def assist() -> None:
            while not over.is_set():
                helper.step()

        def both() -> None:
            try:
                at_once(partial(train, nets[0], opts[0], 2), partial(train, nets[1], opts[1], 3))
            finally:
                over.set()
                for opt in opts:  # a group of the next epoch may have formed already: the helper must not wait for them
                    opt.shutdown()

        at_once(both, assist)
        assert any(each.purpose == "modes_grads" and each.outcome == "committed" for each in rounds)
        assert all(opt.local_epoch >= EPOCHS for opt in opts)
        assert all(loss_of(net, samples(0)).item() < before for net in nets)
        pairs = list(zip(nets[0].parameters(), nets[1].parameters(), strict=True))
        if opts[0].local_epoch == opts[1].local_epoch and "background" not in mode:
            assert all(torch.allclose(a, b, atol=1e-3) for a, b in pairs)
