"""Peak memory of a trainer, by mode, beside what its tensors should take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch

import swarmcli
from benchmarks._contest import Crew, join_dht

MIB = 1 << 20
WIDTH, LAYERS = 1024, 16  # 64 MiB of parameters in matrices
TINY = 32  # width of matrices that are too small to count
PACE = 0.1  # seconds per batch
EPOCHS = 4
RANK = 32


@dataclass(frozen=True)
class Mode:
    """`copies` is the formula: what a trainer holds, in units of its parameters, by name."""

    name: str
    copies: dict[str, float]
    options: dict[str, Any] = field(default_factory=dict)
    factory: bool = False  # the optimizer is made of `params`

    @property
    def formula(self) -> float:
        return sum(self.copies.values())


BASIC = {"parameters": 1, "gradients": 1, "momentum": 1}
THIN = RANK * 2 / WIDTH  # P and Q of a matrix, beside the matrix


def modes() -> list[Mode]:
    powersgd = swarmcli.PowerSGDGradientAverager.get_factory(averager_rank=RANK)
    poweref = swarmcli.PowerEFGradientAverager.get_factory(averager_rank=RANK)
    plain = {**BASIC, "sums": 1, "means": 1, "results of a round": 1}
    thin = {**BASIC, "sums": 1, "means": 1, "P, Q, results": 4 * THIN}
    offloaded = {**plain, "parameters on the host": 1}
    local = {**BASIC, "host copies of the state": 2, "results of a round": 1}
    return [
        Mode("plain", plain),
        Mode("reused gradient buffers", {**BASIC, "means": 1, "results of a round": 1}, {"reuse_grad_buffers": True}),
        Mode("PowerSGD", {**thin, "residuals": 1}, {"grad_averager": powersgd}),
        Mode("PowerEF", {**thin, "estimates": 1}, {"grad_averager": poweref}),
        Mode("offloaded", offloaded, {"offload_optimizer": True}, factory=True),
        Mode("delayed step", offloaded, {"delay_optimizer_step": True}, factory=True),
        Mode("delayed averaging", offloaded, {"delay_grad_averaging": True}, factory=True),
        Mode("local updates", local, {"grad_averager": None}),
    ]


def run_trainer(pipe: Pipe, index: int, number: int, width: int) -> None:
    """Trains for a few epochs, and answers with how many bytes the peak is above the beginning."""
    torch.set_num_threads(1)
    mode = modes()[number]
    with join_dht(pipe, index) as dht:
        torch.zeros(MIB).add_(1)  # what torch itself needs
        before = resident("VmRSS")
        parameters = [torch.nn.Parameter(torch.zeros(width, width)) for _ in range(LAYERS)]
        optimizer = swarmcli.Optimizer(
            dht=dht,
            run_id="bench",
            target_batch_size=16,
            batch_size_per_step=4,
            optimizer=make if mode.factory else make(parameters),
            params=parameters if mode.factory else None,
            **mode.options,
        )
        pipe.recv()
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3) if parameter.grad is None else parameter.grad
        while optimizer.local_epoch < EPOCHS:
            if mode.options.get("reuse_grad_buffers"):
                for parameter in parameters:
                    parameter.grad.add_(1e-3)
            time.sleep(PACE)
            optimizer.step()
        pipe.send(resident("VmHWM") - before)
        pipe.recv()


def make(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-6, momentum=0.9)


def resident(kind: str) -> int:
    """Bytes of this process in memory: at present (VmRSS), or at most so far (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"this system does not tell {kind}")


def peak(number: int, width: int) -> int:
    """Lets two trainers train in one mode; returns the larger one's peak, in bytes above its beginning."""
    crew = Crew(run_trainer, 2, number, width)
    try:
        return max(crew.ask())
    finally:
        crew.end()


def measure(report: Callable[[str], None]) -> None:
    least = peak(0, TINY)
    nbytes = 4 * LAYERS * WIDTH * WIDTH
    report(
        f"  code, network and so on: {least / MIB:.0f} MiB; the rest in units of {nbytes / MIB:.0f} MiB of parameters"
    )
    for number, mode in enumerate(modes()):
        copies = (peak(number, WIDTH) - least) / nbytes
        names = " + ".join(f"{each:g} {name}" for name, each in mode.copies.items())
        report(f"  {mode.name:24} peak {copies:5.2f}   formula {mode.formula:5.2f} = {names}")


if __name__ == "__main__":
    measure(lambda line: print(line, flush=True))
