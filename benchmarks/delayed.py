"""Training that goes on while gradients are averaged: samples per second beside a trainer that never averages.

Two trainers, each a process behind a link of 100 Mbit/s of its own (network namespaces with tbf; see _namespaces.py).
The batches of an epoch are chosen so that its averaging takes half of its time. Stretches of the same loop with a
plain torch optimizer, both processes at once, are measured before and after: so both kinds share the machine alike.
Both sum their gradients in the parameters' own buffers, which is the cheapest way. Where the trainers compute on all
processors of the machine, averaging takes its processor time from them (`processor`); where they wait for an
accelerator, which a pause stands for, it does not (`accelerator`). On a machine that others use figures vary more than
they differ.

    python -m benchmarks.delayed [accelerator] [processor]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any

import torch

import swarmcli
from benchmarks import _namespaces as namespaces
from benchmarks.links import Swarm, optimum
from swarmcli.events import EpochAdvanced

KINDS = ("accelerator", "processor")
TARGET = 0.90  # of the samples per second without averaging
MBIT = 100.0
PEERS = 2
WIDTH, HIDDEN, BATCH = 1024, 2048, 48
EPOCHS = 4  # in each stretch, after two to warm up
PAUSE = 0.015  # seconds in which an accelerator would compute
ROUNDS = 2  # stretches with averaging, each between two without
PARAMETERS = 2 * WIDTH * HIDDEN


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, HIDDEN, bias=False), torch.nn.GELU(), torch.nn.Linear(HIDDEN, WIDTH, bias=False)
    )


def make_optimizer(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)  # type: ignore[arg-type]


def computing(model: torch.nn.Module, kind: str) -> Callable[[], None]:
    """One batch: forward and backward pass, or a short one and a pause."""
    inputs = torch.randn(BATCH if kind == "processor" else 1, WIDTH)

    def compute() -> None:
        (model(inputs) - inputs).square().mean().backward()
        if kind == "accelerator":
            time.sleep(PAUSE)

    return compute


def without_averaging(kind: str, batches: int, epochs: int) -> tuple[float, float]:
    """Samples per second of a trainer that steps by itself, and its processor seconds per batch."""
    model = make_model()
    compute, optimizer = computing(model, kind), make_optimizer(model.parameters())
    began, process = time.perf_counter(), time.process_time()
    for _ in range(epochs):
        optimizer.zero_grad(set_to_none=False)
        for _ in range(batches):
            compute()
        optimizer.step()
    done = epochs * batches
    return done * BATCH / (time.perf_counter() - began), (time.process_time() - process) / done


@dataclass
class Measured:
    """The figures of a trainer that averages, from its third epoch on."""

    rate: float  # samples per second
    epoch: float  # seconds, the median
    averaging: float  # seconds of an epoch's averaging, the median
    stepping: float  # part of the time that the loop spends in step()
    processor: float  # seconds per batch, of all threads


def with_averaging(dht: swarmcli.DHT, run_id: str, kind: str, batches: int, epochs: int) -> Measured:
    """Trains with averaging after two epochs to warm up; returns what was measured."""
    model = make_model()
    compute = computing(model, kind)
    ended: list[EpochAdvanced] = []
    unsubscribe = dht.node.endpoint.events.subscribe(
        lambda event: ended.append(event) if isinstance(event, EpochAdvanced) else None
    )
    optimizer = swarmcli.Optimizer(
        dht=dht,
        run_id=run_id,
        target_batch_size=PEERS * batches * BATCH,
        batch_size_per_step=BATCH,
        optimizer=make_optimizer,
        params=model.parameters(),
        delay_grad_averaging=True,
        reuse_grad_buffers=True,
    )

    def train(until: int) -> tuple[int, float]:
        """The number of batches, and the seconds in step()."""
        done, stepping = 0, 0.0
        while optimizer.local_epoch < until:
            compute()
            began = time.perf_counter()
            optimizer.step()
            stepping += time.perf_counter() - began
            done += 1
        return done, stepping

    try:
        train(2)
        began, process = time.perf_counter(), time.process_time()
        done, stepping = train(2 + epochs)
        seconds = time.perf_counter() - began
        processor = (time.process_time() - process) / done
    finally:
        optimizer.shutdown()
        unsubscribe()
    return Measured(
        rate=done * BATCH / seconds,
        epoch=statistics.median(event.seconds for event in ended[2:]),
        averaging=statistics.median(event.averaging_seconds for event in ended[2:]),
        stepping=stepping / seconds,
        processor=processor,
    )


def run_trainer(pipe: Pipe, index: int, mbit: float) -> None:
    """Does what each message asks for, and answers with what it measured."""
    torch.set_num_threads(1)
    host = namespaces.settle(pipe, index, mbit)
    first = swarmcli.DHT(start=True, host=host) if index == 0 else None
    pipe.send(first.get_visible_addresses()[0] if first else None)
    contact = pipe.recv()
    dht = first or swarmcli.DHT([contact], start=True, host=host)
    while True:
        what, kind, batches, epochs = pipe.recv()
        if what == "alone":
            pipe.send(without_averaging(kind, batches, epochs))
        else:
            pipe.send(with_averaging(dht, what, kind, batches, epochs))


def measure(kind: str) -> None:
    swarm = Swarm(run_trainer, [MBIT] * PEERS)

    def ask(what: str, batches: int, epochs: int) -> list[Any]:
        swarm.tell((what, kind, batches, epochs))
        return [pipe.recv() for pipe in swarm.pipes]

    ask("alone", 10, 1)
    rate = statistics.mean(each for each, _ in ask("alone", 50, 1))
    batches = _at_least_one(2.4 * optimum([MBIT] * PEERS, PARAMETERS * 4) * rate / BATCH)
    last = ask("to begin with", batches, 2)[0]
    shares = []
    for number in range(ROUNDS):
        batches = _at_least_one(batches * 2 * last.averaging / last.epoch)
        before = ask("alone", batches, EPOCHS)
        results = ask(f"measured {number}", batches, EPOCHS)
        after = ask("alone", batches, EPOCHS)
        together, last = sum(result.rate for result in results), results[0]
        alone = [sum(each for each, _ in stretch) for stretch in (before, after)]
        shares.append(together / statistics.mean(alone))
        processor = statistics.mean(seconds for _, seconds in before + after)
        print(
            f"  {kind}: {batches} batches of {BATCH} per trainer and epoch: an epoch takes {last.epoch:.2f} s, its "
            f"averaging {last.averaging:.2f} s ({last.averaging / last.epoch:.0%}); {together:.0f} samples/s, without "
            f"averaging {alone[0]:.0f} before and {alone[1]:.0f} after: {shares[-1]:.0%}; by processor time per batch "
            f"{processor / statistics.mean(result.processor for result in results):.0%}. "
            f"In step() {last.stepping:.1%} of the time",
            flush=True,
        )
    swarm.kill()
    middle = statistics.median(shares)
    print(f"  {kind}: median {middle:.0%}; target {TARGET:.0%}: {'met' if middle >= TARGET else 'MISSED'}", flush=True)


def _at_least_one(batches: float) -> int:
    return max(1, round(batches))


def main() -> None:
    chosen = sys.argv[1:] or list(KINDS)
    if not namespaces.permitted():
        print("  left out: this system does not let us make network namespaces with tbf (unshare -Urn, tc)")
    elif namespaces.inside():
        print(f"  {PEERS} trainers behind {MBIT:.0f} Mbit/s, {PARAMETERS / 1e6:.1f} M parameters, delayed averaging")
        for kind in chosen:
            measure(kind)
    else:
        sys.exit(namespaces.rerun_inside("benchmarks.delayed", chosen))


if __name__ == "__main__":
    main()
