"""Trainer, Lightning and accelerate as they call `step`: what they would make wrong in silence is refused."""

from collections.abc import Callable
from types import SimpleNamespace as Double
from typing import Any

import pytest
import torch

from swarmcli.dht import DHT
from swarmcli.errors import OptimizerError
from swarmcli.optim import Optimizer
from tests.optim.test_optimizer import TARGET, model, optimizer


def called_from(module: str, source: str) -> Callable[..., None]:
    """A function of that module, as far as its frame tells."""
    names: dict[str, Callable[..., None]] = {"__name__": module}  # type: ignore[dict-item]
    exec(source, names)
    return names["train"]


TRAINER = called_from("transformers.trainer", "def train(self, step): step()")
LIGHTNING = called_from("lightning.pytorch.trainer.call", "def train(trainer, step): step()")


@pytest.mark.parametrize(
    ("train", "clips", "does_not", "remedy"),
    [
        (TRAINER, Double(args=Double(max_grad_norm=1.0)), Double(args=Double(max_grad_norm=0)), "max_grad_norm=0"),
        (LIGHTNING, Double(gradient_clip_val=1), Double(gradient_clip_val=None), "gradient_clip_val"),
    ],
)
def test_a_trainer_that_clips_each_batch_is_refused(dht: DHT, train, clips, does_not, remedy) -> None:
    net = model()
    with optimizer(dht, net, batch_size_per_step=4) as opt:
        net(torch.ones(4, 4, dtype=torch.float64)).sum().backward()
        with pytest.raises(OptimizerError, match=f"{remedy}.*max_grad_norm=1.*, which clips the average"):
            train(clips, opt.step)
        train(does_not, opt.step)
        assert opt.local_progress.samples_accumulated == 4


@pytest.mark.parametrize("reuse", [False, True])
def test_the_average_is_clipped(dht: DHT, reuse: bool) -> None:
    torch.manual_seed(1)
    batches = [torch.randn(4, 4, dtype=torch.float64) for _ in range(TARGET // 4)]
    net, again = model(), model()
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    options = {"run_id": "clips", "target_batch_size": TARGET, "max_grad_norm": 0.1, "reuse_grad_buffers": reuse}
    with Optimizer(dht=dht, optimizer=inner, **options) as opt:
        for rows in batches:
            if not reuse:
                net.zero_grad()
            net(rows).square().mean().backward()
            opt.step(batch_size=4)
        assert opt.local_epoch == 1
    assert not opt.is_alive()
    again(torch.cat(batches)).square().mean().backward()
    assert torch.nn.utils.clip_grad_norm_(again.parameters(), 0.1) > 0.2
    torch.optim.SGD(again.parameters(), lr=1.0).step()
    for ours, theirs in zip(net.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def train_accumulating(opt: torch.optim.Optimizer, accelerator: Any, net: torch.nn.Module) -> None:
    """The loop of accelerate's own pages."""
    for rows in torch.arange(64.0, dtype=torch.float64).reshape(8, 2, 4):
        with accelerator.accumulate(net):
            accelerator.backward(net(rows).square().mean())
            opt.step()
            opt.zero_grad()


def test_accelerate_accumulates_for_an_optimizer_that_it_prepared(
    dht: DHT, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator  # only now: it takes a second, and every process of a run collects this file
    from accelerate.state import GradientState

    monkeypatch.setattr(GradientState, "_shared_state", {})  # of the whole process
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    net, again = model(), model()
    given = accelerator.prepare(net)
    options = {"run_id": "accumulates", "target_batch_size": 8, "batch_size_per_step": 8}
    with Optimizer(dht=dht, optimizer=torch.optim.AdamW(net.parameters()), **options) as opt:
        given(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        with pytest.raises(OptimizerError, match="save_state leaves it out"):
            opt.step()
        with pytest.raises(OptimizerError, match=r"hand it to accelerator\.prepare"):
            train_accumulating(opt, accelerator, given)
        net.zero_grad()
        accelerator.step = 0
        train_accumulating(accelerator.prepare(opt), accelerator, given)
        assert opt.local_epoch == 2
        accelerator.save_state(str(tmp_path))
        train_accumulating(accelerator._optimizers[0], accelerator, given)
        assert opt.local_epoch == 4
        accelerator.load_state(str(tmp_path))
        assert opt.local_epoch == 2
        with accelerator.accumulate(given), pytest.raises(OptimizerError, match="a fraction of each gradient"):
            opt.step()  # and not what was prepared
    inner = torch.optim.AdamW(again.parameters())
    for batch in torch.arange(64.0, dtype=torch.float64).reshape(2, 8, 4):
        inner.zero_grad()
        again(batch).square().mean().backward()
        inner.step()
    for ours, theirs in zip(net.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
