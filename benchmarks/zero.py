"""The sharded optimizer: memory of its state on each rank beside the formula, peak memory and time of a step beside
torch's.

Ranks are processes with one thread each and gloo between them; gradients are there already, so that a step is the
local optimizer's and the exchange of parameters. Both optimizers step in turns in the same processes, each on a model
of its own; a step takes as long as at its slowest rank. Memory is measured in processes that have one of them only.
`overlap` is a whole iteration under DistributedDataParallel, with the step after the backward pass or inside it.

    python -m benchmarks.zero [small] [gpt2] [overlap]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks._contest import Crew
from benchmarks._memory import MIB, resident

STEPS = {"small": 60, "gpt2": 9}  # of each optimizer, after two to warm up
RANKS = (2, 4)
STATE_BYTES = 8  # K: Adam's two moments of a float32 parameter
KINDS = ("torch", "swarm")
WHERE = ("after it", "at its end", "inside it")
ITERATIONS = 30


def shapes(model: str) -> list[tuple[int, ...]]:
    """GPT-2's (124 million parameters, 148 tensors), or those of a model like it with 3 million, 52 tensors."""
    width, layers, words, places = (768, 12, 50257, 1024) if model == "gpt2" else (256, 4, 512, 128)
    layer = [
        *[(width,)] * 4,
        *[(width, 3 * width), (3 * width,), (width, width), (width,)],
        *[(width, 4 * width), (4 * width,), (4 * width, width), (width,)],
    ]
    return [(words, width), (places, width), *layer * layers, (width,), (width,)]


def make(kind: str, sizes: Sequence[tuple[int, ...]], views: bool) -> torch.optim.Optimizer:
    """The optimizer with parameters of its own, whose gradients are set. "whole" is not sharded."""
    parameters = [torch.nn.Parameter(torch.full(shape, 0.1)) for shape in sizes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    if kind == "whole":
        return torch.optim.Adam(parameters, lr=1e-4)
    return sharded_class(kind)(parameters, torch.optim.Adam, parameters_as_bucket_view=views, lr=1e-4)


def sharded_class(kind: str) -> Any:
    """Only the one asked for is imported, since that takes memory, too."""
    if kind == "torch":
        from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs

        return Torchs
    from swarmcli.sharding import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer


def join_world(pipe: Pipe, index: int, ranks: int) -> None:
    """The process becomes a rank; rank 0 tells the others where to meet."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if index == 0 else None
    pipe.send(store.port if store else None)
    port = pipe.recv()[0]
    store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=index, world_size=ranks, timeout=timedelta(seconds=120))


def time_steps(pipe: Pipe, index: int, ranks: int, model: str, views: bool) -> None:
    """Answers with the seconds of each step, by optimizer."""
    join_world(pipe, index, ranks)
    optimizers = {kind: make(kind, shapes(model), views) for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    pipe.recv()
    for turn in range(2 + STEPS[model]):
        for kind in KINDS if turn % 2 else reversed(KINDS):
            dist.barrier()
            began = time.perf_counter()
            optimizers[kind].step()
            seconds[kind].append(time.perf_counter() - began)
    pipe.send({kind: times[2:] for kind, times in seconds.items()})
    pipe.recv()


def weigh(pipe: Pipe, index: int, ranks: int, kind: str, model: str, views: bool) -> None:
    """Answers with the bytes of this rank's state, and by how many the peak of three steps is above the beginning."""
    join_world(pipe, index, ranks)
    make(kind, [(16,)] * 8, views).step()  # imports and buffers that torch and gloo need whatever the size
    before = resident("VmRSS")
    optimizer = make(kind, shapes(model), views)
    pipe.recv()
    for _ in range(3):
        optimizer.step()
    local = getattr(optimizer, "optim", optimizer)
    state = sum(value.untyped_storage().nbytes() for values in local.state.values() for value in values.values())
    pipe.send((state, resident("VmHWM") - before))
    pipe.recv()


def time_iterations(pipe: Pipe, index: int, ranks: int) -> None:
    """Answers with the seconds of each iteration, by where it steps."""
    join_world(pipe, index, ranks)
    iterations = {where: iterating(where) for where in WHERE}
    seconds: dict[str, list[float]] = {where: [] for where in WHERE}
    pipe.recv()
    for _ in range(4 + ITERATIONS):
        for where, iterate in iterations.items():
            dist.barrier()
            began = time.perf_counter()
            iterate()
            seconds[where].append(time.perf_counter() - began)
    pipe.send({where: times[4:] for where, times in seconds.items()})
    pipe.recv()


def iterating(where: str) -> Callable[[], None]:
    """Makes a model of 8 layers, 8 million parameters; returns a function that trains it by one batch."""
    width, layers, rows = 1024, 8, 64
    ddp = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))))
    overlap = where != "after it"
    zero = sharded_class("swarm")(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=overlap, lr=1e-4)
    if overlap:
        from swarmcli.sharding import hook_with_zero_step, hook_with_zero_step_interleaved

        make_hook = hook_with_zero_step if where == "at its end" else hook_with_zero_step_interleaved
        ddp.register_comm_hook(None, make_hook(allreduce_hook, ddp, zero))
    inputs = torch.randn(rows, width)

    def iterate() -> None:
        ddp.zero_grad()
        ddp(inputs).square().mean().backward()
        if not overlap:
            zero.step()

    return iterate


def compare_overlap() -> None:
    for ranks in RANKS:
        told = asked(time_iterations, ranks)
        medians = {
            where: statistics.median(map(max, zip(*(each[where] for each in told), strict=True))) for where in WHERE
        }
        steps = ", ".join(f"{where} {1000 * seconds:.1f} ms" for where, seconds in medians.items())
        print(f"  {ranks} ranks, an iteration that steps {steps}, of the backward pass", flush=True)


def asked(target: Callable[..., None], ranks: int, *arguments: Any) -> list[Any]:
    crew = Crew(target, ranks, ranks, *arguments)
    try:
        return crew.ask(patience=600.0)
    finally:
        crew.end()


def compare_times(model: str, ranks: int, views: bool) -> str:
    told = asked(time_steps, ranks, model, views)
    slowest = {kind: [max(times) for times in zip(*(each[kind] for each in told), strict=True)] for kind in KINDS}
    ratios = [ours / theirs for theirs, ours in zip(slowest["torch"], slowest["swarm"], strict=True)]
    theirs, ours = (1000 * statistics.median(slowest[kind]) for kind in KINDS)
    return f"step {ours:7.1f} ms, torch's {theirs:7.1f} ms, ratio {statistics.median(ratios):.2f}"


def compare_memory(model: str, ranks: int, views: bool, report: Callable[[str], None]) -> None:
    elements = sum(map(torch.Size.numel, map(torch.Size, shapes(model))))
    even = STATE_BYTES * elements / ranks
    formula = 4 * elements * 2 + even  # parameters, gradients, state
    for kind in ("whole", *KINDS) if not views else KINDS:
        told = asked(weigh, ranks, kind, model, views)
        states = " ".join(f"{state / MIB:.1f}" for state, _peak in told)
        peaks = max(peak for _state, peak in told)
        report(
            f"    {kind:5}: state {states} MiB (K·Ψ/N {even / MIB:.1f}), peak {peaks / MIB:.0f} MiB "
            f"(Ψ + gradients + K·Ψ/N {formula / MIB:.0f})"
        )


def measure(models: Sequence[str]) -> None:
    for model in models:
        elements = sum(map(torch.Size.numel, map(torch.Size, shapes(model))))
        print(f"{model}: {elements / 1e6:.1f} million parameters in {len(shapes(model))} tensors, float32, Adam")
        for ranks in RANKS:
            for views in (False, True):
                layout = "bucket views" if views else "tensor by tensor"
                print(f"  {ranks} ranks, {layout}: {compare_times(model, ranks, views)}", flush=True)
                compare_memory(model, ranks, views, lambda line: print(line, flush=True))


def main() -> None:
    wanted = [each for each in sys.argv[1:] if each in (*STEPS, "overlap")] or [*STEPS, "overlap"]
    measure([each for each in wanted if each in STEPS])
    if "overlap" in wanted:
        print("overlap with DDP: a backward pass and a step")
        compare_overlap()


if __name__ == "__main__":
    main()
