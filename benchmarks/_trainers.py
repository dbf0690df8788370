"""The trainers of this project that benchmarks/optimizer.py runs, each a process."""

from __future__ import annotations

from multiprocessing.connection import Connection as Pipe
from typing import Any

import torch

import swarmcli
from benchmarks._contest import join_dht
from benchmarks._training import Work, begin_process, parameters_of, time_steps, torch_optimizer, train


def options_of(work: Work) -> dict[str, Any]:
    """The options of the Optimizer that are not the default."""
    options: dict[str, Any] = {}
    if work.matchmaking_time is not None:
        options["matchmaking_time"] = work.matchmaking_time
    if work.rank is not None:
        options["grad_averager"] = swarmcli.PowerSGDGradientAverager.get_factory(averager_rank=work.rank)
    return options


def train_here(pipe: Pipe, index: int, work: Work) -> None:
    begin_process()
    parameters, compute = parameters_of(work.model)
    with join_dht(pipe, index) as dht:
        optimizer = make_optimizer(dht, parameters, work)
        optimizer.load_state_from_peers()  # joins the run
        pipe.recv()
        pipe.send(train(optimizer, compute, work))
        pipe.recv()


def measure_steps(pipe: Pipe, index: int, work: Work) -> None:
    """Answers with the seconds of a step that only accumulates, and of one addition over the gradients."""
    parameters, compute = parameters_of(work.model)
    compute()
    with join_dht(pipe, index) as dht:
        optimizer = make_optimizer(dht, parameters, work, target=1 << 40)
        pipe.recv()
        pipe.send(time_steps(optimizer, parameters, work))
        pipe.recv()


def make_optimizer(
    dht: swarmcli.DHT, parameters: list[torch.nn.Parameter], work: Work, target: int | None = None
) -> swarmcli.Optimizer:
    return swarmcli.Optimizer(
        dht=dht,
        run_id="bench",
        target_batch_size=target or work.target,
        batch_size_per_step=work.batch_size,
        optimizer=torch_optimizer(parameters),
        **options_of(work),
    )
