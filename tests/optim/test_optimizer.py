"""The shell: torch's view, several peers over TCP in one process, interrupts, and what it refuses."""

import asyncio
import copy
import os
import signal
import threading
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from swarmcli.dht import DHT
from swarmcli.errors import IdentityError, OptimizerError
from swarmcli.network.loop_thread import LoopThread
from swarmcli.optim import Optimizer, PeerDescription
from tests.optim.shells import at_once, dhts

TARGET = 16


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def optimizer(dht: DHT, net: torch.nn.Module, **options) -> Optimizer:
    settings = {"run_id": "shell", "target_batch_size": TARGET, "params": net.parameters()}
    settings["optimizer"] = lambda params: torch.optim.AdamW(params, lr=0.01)
    settings["scheduler"] = lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda epoch: 1 / (1 + epoch))
    return Optimizer(dht=dht, **settings | options)


def train(net: torch.nn.Module, opt: Optimizer, epochs: int, seed: int) -> None:
    """The loop of anyone's script."""
    data = torch.Generator().manual_seed(seed)
    while opt.local_epoch < epochs:
        rows = torch.randn(4, 4, dtype=torch.float64, generator=data)
        opt.zero_grad()
        loss = ((net(rows) - rows.sum(1, keepdim=True)) ** 2).mean()
        loss.backward()
        opt.step(batch_size=len(rows))


def test_two_trainers_and_a_monitor_in_threads_over_tcp() -> None:
    before = set(threading.enumerate())
    with dhts(3) as (first, second, third), ExitStack() as stack:
        nets = [model(seed) for seed in (1, 2, 3)]
        opts = [optimizer(dht, net) for dht, net in zip((first, second), nets, strict=False)]
        monitor = optimizer(third, nets[2], description=PeerDescription("monitor", "watcher"))
        for opt in (*opts, monitor):
            stack.callback(opt.shutdown)

        def follow() -> None:
            while monitor.local_epoch < 6:
                monitor.step(batch_size=0)

        trainers = [lambda n=n: train(nets[n], opts[n], 6, seed=n) for n in range(2)]
        at_once(*trainers, follow)
        assert all(opt.is_synchronized_with_peers() for opt in opts)  # asked from a thread that has no loop
        assert {opt.local_epoch for opt in (*opts, monitor)} == {6}
        assert len({opt.state_digest() for opt in (*opts, monitor)}) == 1
        assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[2].parameters(), strict=True))
        assert opts[0].param_groups[0]["lr"] == pytest.approx(0.01 / 7)
        assert "watcher" in {report.name for report in opts[0].peers().values()}
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("swarm-")]


def test_a_batch_calls_into_the_loop_once_and_its_gradients_stay_where_they_are(
    dht: DHT,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    submit = LoopThread.submit

    def counted(thread: LoopThread, coroutine: Coroutine[Any, Any, Any]) -> Any:
        calls.append(coroutine.__qualname__)
        return submit(thread, coroutine)

    net = model()
    with optimizer(dht, net, target_batch_size=1 << 20) as opt:
        opt.load_state_from_peers()
        monkeypatch.setattr(LoopThread, "submit", counted)
        for batch in range(1, 4):
            net.zero_grad()
            net(torch.ones(4, 4, dtype=torch.float64)).mean().backward()
            gradients = [parameter.grad for parameter in net.parameters()]
            places = [gradient.data_ptr() for gradient in gradients]
            opt.note_loss(1.0, 4)
            opt.step(batch_size=4)
            assert len(calls) == batch, "what a training loop asks beside the step waits for no other thread"
            assert opt.local_epoch == 0 and not opt.is_averaging
            found = [parameter.grad for parameter in net.parameters()]
            assert all(a is b for a, b in zip(found, gradients, strict=True))
            assert [gradient.data_ptr() for gradient in found] == places


def test_alone_with_a_closure(dht: DHT) -> None:
    net = model()
    opt = optimizer(dht, net, batch_size_per_step=TARGET)
    rows = torch.ones(TARGET, 4, dtype=torch.float64)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = ((net(rows) - 1) ** 2).mean()
        loss.backward()
        return loss

    losses = [opt.step(closure).item() for _ in range(5)]
    assert opt.local_epoch == 5
    assert losses[-1] < losses[0]
    assert opt.report().loss == pytest.approx(losses[-1])
    assert opt.local_progress.samples_accumulated == 0
    assert opt.is_synchronized_with_peers()
    assert not opt.load_state_from_peers()
    opt.shutdown()


def test_it_looks_like_a_torch_optimizer(dht: DHT) -> None:
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    opt = Optimizer(dht=dht, run_id="shell", target_batch_size=4, optimizer=inner)
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.param_groups is inner.param_groups
    assert opt.defaults["lr"] == 0.5
    net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    opt.step(batch_size=4)
    assert opt.state is inner.state and len(opt.state) == 4
    opt.zero_grad()
    assert all(not parameter.grad.any() for parameter in net.parameters())
    opt.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert "shell" in repr(opt)
    with pytest.raises(OptimizerError, match="added"):
        opt.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    opt.shutdown()


def test_a_checkpoint_survives_torch_save(dht: DHT, tmp_path) -> None:
    net = model()
    opt = optimizer(dht, net)
    train(net, opt, 3, seed=1)
    torch.save({"model": net.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "checkpoint")
    digest = opt.state_digest()
    opt.shutdown()
    again = model(5)
    saved = torch.load(tmp_path / "checkpoint", weights_only=True)
    again.load_state_dict(saved["model"])
    resumed = optimizer(dht, again)
    resumed.load_state_dict(saved["optimizer"])
    assert (resumed.local_epoch, resumed.state_digest()) == (3, digest)
    train(again, resumed, 5, seed=2)
    resumed.shutdown()


def test_waiting_can_be_interrupted_and_gone_on_with(dht: DHT) -> None:
    async def interrupt_soon() -> None:
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGINT)

    opt = optimizer(dht, model(), description=PeerDescription("monitor"))
    opt.load_state_from_peers()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores Ctrl-C
    try:
        dht.run_coroutine(interrupt_soon())
        with pytest.raises(KeyboardInterrupt):
            opt.step(batch_size=0)
    finally:
        signal.signal(signal.SIGINT, before)
    opt.step(batch_size=0)
    opt.shutdown()


def test_an_auxiliary_takes_neither_batches_nor_closures(dht: DHT) -> None:
    opt = optimizer(dht, model(), auxiliary=True)
    with pytest.raises(OptimizerError, match="assists"):
        opt.step(batch_size=4)
    with pytest.raises(OptimizerError, match="assists"):
        opt.step(closure=lambda: 0.0)
    with pytest.raises(OptimizerError, match="holds no parameters"):
        opt.state_digest()
    opt.step()
    assert opt.local_epoch == 0
    assert opt.report().role == "auxiliary"
    assert opt.global_progress.samples_accumulated == 0
    opt.shutdown()
    with pytest.raises(OptimizerError, match="shut down"):
        opt.step()


def test_shutdown_is_idempotent_and_survives_a_dht_that_is_gone() -> None:
    with dhts(2) as (first, second):
        opt = optimizer(first, model())
        opt.shutdown()
        opt.shutdown()
        assert not opt.is_alive()
        orphan = optimizer(second, model())
        second.shutdown()
        orphan.shutdown()


def test_what_a_step_cannot_take_changes_nothing(dht: DHT) -> None:
    net = model()
    with optimizer(dht, net, offload_optimizer=False) as opt:
        net(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        for wrong in (4.0, "4", True):
            with pytest.raises(TypeError, match="batch_size"):
                opt.step(batch_size=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="batch_size=-1"):
            opt.step(batch_size=-1)
        opt.step(batch_size=np.int64(4))
        assert opt.local_progress.samples_accumulated == 4
        next(net.parameters()).requires_grad_(False)
        with pytest.raises(OptimizerError, match="parameter 0 was frozen"):
            opt.step(batch_size=4)
        next(net.parameters()).requires_grad_(True)
        opt.step(batch_size=4)
        assert opt.local_progress.samples_accumulated == 8


def test_it_is_neither_copied_nor_stepped_by_two_threads(dht: DHT) -> None:
    net = model()
    with optimizer(dht, net) as opt:
        with pytest.raises(TypeError, match="use state_dict"):
            copy.deepcopy(opt)
        net(torch.ones(2, 4, dtype=torch.float64)).sum().backward()

        def closure() -> None:
            with pytest.raises(OptimizerError, match="one at a time"):
                at_once(lambda: opt.step(batch_size=4))

        opt.step(closure, batch_size=4)  # also after the copy that was refused
        seen: list[int] = []
        opt.register_step_pre_hook(lambda *_: seen.append(1))
        opt.step(batch_size=TARGET)
        assert seen == [1]
        dht.endpoint.gave_way = "another process has this peer's key"
        with pytest.raises(IdentityError, match="another process"):
            opt.step(batch_size=4)
        dht.shutdown()
        with pytest.raises(OptimizerError, match="the DHT under it has been shut down"):
            opt.step(batch_size=4)


@pytest.mark.parametrize("options", [{}, {"grad_averager": None}, {"delay_grad_averaging": True}])
def test_a_rate_that_somebody_else_moves_is_refused(dht: DHT, options: dict[str, Any]) -> None:
    net = model()
    with optimizer(dht, net, scheduler=None, **options) as opt:
        # As Trainer, accelerate and Lightning step one: with this peer's batches.
        theirs = torch.optim.lr_scheduler.LambdaLR(opt, lambda batch: 1 / (1 + batch))

        def train_on(epochs: int) -> None:
            while opt.local_epoch < epochs:
                net(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
                opt.step(batch_size=TARGET // 2)

        train_on(2)
        theirs.step()
        with pytest.raises(OptimizerError, match=r"0.01\] to \[0.005\].*scheduler=…"):
            train_on(4)
