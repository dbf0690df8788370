"""Bytes for each sample against the loss on text that nobody trains on, for every way to train, after equal samples.

Four peers in one process: a byte-level GPT learns Python's own sources. Gradients, differences and codecs are the very
ones of the Optimizer; only the network is left out. Every way gets the same three learning rates on even data (each
peer draws from all sources), and its best one again on uneven data (each from a quarter of its own). Those of FRONTIER
also train with 2 and 8 peers, beside a straggler of a quarter of the speed, and with 20 % churn at each round, with
several seeds.

    python -m benchmarks.modes [--keep FILE.json] [--samples N] [--seeds N] [--page docs/modes.md]
                                [--picture docs/modes.svg] [--known] [--only WAY ...] [--medium]

What is in FILE.json already is not computed again, so the script goes on where it stopped; with --known nothing is
computed, and ways that are not there yet are left out. With --medium the model has the 10.8 million parameters of the
templates `home` and `slow-links`, and takes thirty times as long.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks._convergence import BYTES, Sources, average, weighted_mean
from swarmcli.compression import BlockwiseQuantization, CompressionBase, NoCompression
from swarmcli.optim.gradients.accumulator import GradientAccumulator, GradientMethod
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.modes.low_rank import PowerEF, PowerSGD
from swarmcli.optim.modes.outer import Outer
from swarmcli.optim.modes.sparse import Sparse
from swarmcli.optim.state.anchor import Anchored
from swarmcli.optim.state.differences import Differences, steps_of
from swarmcli.optim.state.replica import InPlace
from swarmcli.training.muon import MuonWithAdamW

BATCH, CONTEXT = 16, 32
SAMPLES = 16_384
SLOWER = 4  # times, the first peer where there is a straggler
RATES = {False: (1e-3, 3e-3, 1e-2), True: (3e-3, 1e-2, 3e-2)}  # of AdamW, and of Muon
WARM_UP = 0.05  # of all samples
PLAIN = "synchronous, float32"

Codec = CompressionBase


@dataclass(frozen=True)
class Way:
    """How these peers train. `every`: inner steps of each peer between two rounds; 0: gradients are averaged."""

    name: str
    every: int = 0
    codec: Codec = field(default_factory=NoCompression)
    mode: Mode = field(default_factory=Mode)
    muon: bool = False
    outer: Outer | None = None  # None beside `every`: local updates


def ways() -> list[Way]:
    eight, four = BlockwiseQuantization(), BlockwiseQuantization(64, bits=4)
    plain, dense = Outer(BATCH), NoCompression()
    found = [
        Way(PLAIN),
        Way("synchronous, 8 bits", codec=eight),
        Way("synchronous, 4 bits", codec=four),
        Way("PowerSGD of rank 4", mode=PowerSGD(averager_rank=4)),
        Way("PowerEF of rank 4", mode=PowerEF(averager_rank=4)),
        sparse("synchronous", 256, 2),
        Way("local updates, every 15", every=15),
    ]
    for every in (5, 15, 50, 150):
        name = f"outer steps, every {every}"
        found.append(Way(f"{name}, Nesterov", every=every, outer=Outer(BATCH, "nesterov")))
        for bits, codec in ((32, dense), (8, eight), (4, four)):
            found.append(Way(f"{name}, {bits} bits", every=every, codec=codec, outer=plain))
        found.append(sparse(name, 256, 2, every=every, outer=plain))
    found.append(Way("synchronous with Muon", muon=True))
    for every in (5, 15, 50, 150):
        name = f"Muon, outer steps, every {every}"
        found.append(Way(f"{name}, Nesterov", every=every, muon=True, outer=Outer(BATCH, "nesterov")))
        found.append(Way(f"{name}, 4 bits", every=every, codec=four, muon=True, outer=plain))
        found.append(sparse(name, 256, 2, every=every, outer=plain, muon=True))
    return found


def sparse(name: str, k: int, bits: int, **options: Any) -> Way:
    mode = Sparse(k=k, bits=bits)
    return Way(f"{name}, top {k} in {bits} bits", codec=mode.codec, mode=mode, **options)


@dataclass(frozen=True)
class Setting:
    """What the peers are like. `churn`: the chance of each peer to be replaced by a newcomer after a round."""

    name: str
    peers: int = 4
    size: str = "small"
    uneven: bool = False
    straggler: bool = False
    churn: float = 0.0

    def turns(self) -> Iterator[int]:
        """The peer that computes the next batch, without end."""
        for passed in itertools.count(1):
            yield from range(1 if self.straggler and passed % SLOWER else 0, self.peers)

    def replaced(self, drawn: random.Random) -> list[int]:
        return [peer for peer in range(self.peers) if self.churn and drawn.random() < self.churn]


EVEN, UNEVEN = Setting("even"), Setting("uneven", uneven=True)
FEW, MANY = Setting("2 peers", 2), Setting("8 peers", 8)
CHURN = Setting("churn", churn=0.2)
SETTINGS = [EVEN, FEW, MANY, Setting("straggler", straggler=True), CHURN]


class Text:
    """What the peers draw from, and what they are judged by."""

    def __init__(self, setting: Setting, seed: int) -> None:
        sources, peers = Sources.read(), setting.peers
        quarters = sources.training.chunk(peers) if setting.uneven else [sources.training] * peers
        self._own, self._judging = quarters, sources.judging
        self._drawn = [torch.Generator().manual_seed(1000 * seed + peer) for peer in range(peers)]

    def batch(self, peer: int) -> torch.Tensor:
        return self._windows(self._own[peer], BATCH, self._drawn[peer])

    def judge(self, model: Any) -> float:
        """Nats per byte on 512 windows."""
        windows = self._windows(self._judging, 512, torch.Generator().manual_seed(0))
        with torch.no_grad():
            return sum(float(model(input_ids=part, labels=part).loss) for part in windows.split(64)) / 8

    @staticmethod
    def _windows(text: torch.Tensor, samples: int, generator: torch.Generator) -> torch.Tensor:
        begins = torch.randint(len(text) - CONTEXT, (samples, 1), generator=generator)
        return text[begins + torch.arange(CONTEXT)]


SIZES = {"small": {"n_layer": 2, "n_head": 4, "n_embd": 128}, "medium": {"n_layer": 6, "n_head": 6, "n_embd": 384}}


def build(size: str, seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=BYTES, n_positions=CONTEXT, **SIZES[size], resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, initializer_range=0.06, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def optimizer_of(way: Way, model: Any, rate: float) -> torch.optim.Optimizer:
    if not way.muon:
        return torch.optim.AdamW(model.parameters(), rate, (0.9, 0.95), weight_decay=0.0)
    ends = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    inside = [p for p in model.parameters() if p.ndim == 2 and id(p) not in ends and p.shape[0] != CONTEXT]
    others = [p for p in model.parameters() if all(p is not each for each in inside)]
    groups = [{"params": inside, "by_muon": True}, {"params": others, "by_muon": False}]
    return MuonWithAdamW(groups, rate, betas=(0.9, 0.95), eps=1e-8, momentum=0.95, nesterov=True, ns_steps=5)


def rate_at(done: float) -> float:
    """The part of the peak learning rate after this part of all samples, so that all ways cool down alike."""
    return min(1.0, done / WARM_UP) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


class Wire:
    """Counts what travels. A part of everything goes to each of the n peers, which sends its averages to the others."""

    def __init__(self, codec: Codec, peers: int) -> None:
        self.codec, self.peers = codec, peers
        self.brought = 0.0  # bytes of what all peers bring
        self.averages = 0.0  # bytes of the averages

    @property
    def sent(self) -> float:
        """Bytes that all peers have sent: (n - 1)/n of what each brings, and the averages to n - 1 others."""
        return (self.peers - 1) * (self.brought / self.peers + self.averages)

    def average(self, tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        messages = [self.codec.compress(each) for each in tensors]
        self.brought += sum(message.payload_size for message in messages)
        down = self.codec.of_averages
        mean = down.compress(weighted_mean([self.codec.extract(each).clone() for each in messages], weights))
        self.averages += mean.payload_size
        return down.extract(mean).clone()


@torch.no_grad()
def average_tensors(wire: Wire, methods: Sequence[GradientMethod], weights: Sequence[float]) -> None:
    for tensors in zip(*(method.tensors for method in methods), strict=True):
        mean = wire.average(tensors, weights)
        for tensor in tensors:
            tensor.copy_(mean)


def clip(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def learn(model: Any, windows: torch.Tensor) -> None:
    model.zero_grad()
    model(input_ids=windows, labels=windows).loss.backward()


def by_gradients(way: Way, setting: Setting, text: Text, rate: float, samples: int, seed: int) -> tuple[Any, Wire]:
    """Trains by averaged gradients; returns the model at the end, and what has travelled."""
    model, wire = build(setting.size, seed), Wire(way.codec, setting.peers)
    optimizer = optimizer_of(way, model, rate)
    accumulators = [GradientAccumulator(list(model.parameters())) for _ in range(setting.peers)]
    methods = [way.mode.method(accumulator.means) for accumulator in accumulators]
    epoch, turns, drawn = setting.peers * BATCH, setting.turns(), random.Random(seed)
    for done in range(0, samples, epoch):
        for peer in itertools.islice(turns, setting.peers):
            learn(model, text.batch(peer))
            accumulators[peer].add(BATCH)
        weights = [accumulator.freeze().weight for accumulator in accumulators]
        for method, weight in zip(methods, weights, strict=True):
            method.load(weight)
        if methods[0].program is None:
            average_tensors(wire, methods, weights)
        else:
            average(methods, weights, (done // epoch).to_bytes(4))
            thin = sum(tensor.nbytes for tensor in methods[0].tensors)
            wire.brought, wire.averages = wire.brought + setting.peers * thin, wire.averages + thin
        for method, accumulator in zip(methods, accumulators, strict=True):
            method.finish(sum(weights), counted=True)
            accumulator.settle()
        for parameter, gradient in zip(model.parameters(), methods[0].averaged, strict=True):
            parameter.grad = gradient.clone()
        set_rate(optimizer, rate, done / samples)
        clip(model)
        optimizer.step()
        for peer in setting.replaced(drawn):
            methods[peer].reset_own()
    return model, wire


def set_rate(optimizer: torch.optim.Optimizer, rate: float, done: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * rate_at(done)


def by_own_steps(way: Way, setting: Setting, text: Text, rate: float, samples: int, seed: int) -> tuple[Any, Wire]:
    """Trains by outer steps, or by local updates whose parameters are averaged; returns as `by_gradients`."""
    models, wire = [build(setting.size, seed) for _ in range(setting.peers)], Wire(way.codec, setting.peers)
    optimizers = [optimizer_of(way, model, rate) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.register_step_pre_hook(lambda *_, model=model: clip(model))
    make = way.outer.make if way.outer is not None else Outer(BATCH).make
    places = [Anchored(InPlace(list(model.parameters())), make) for model in models]
    peers = [Differences(*pair, BATCH) for pair in zip(places, optimizers, strict=True)]
    methods = [way.mode.method(own.means) for own in peers]
    step, turns, drawn = setting.peers * BATCH, setting.turns(), random.Random(seed)
    for done in range(BATCH, samples + BATCH, BATCH):
        peer = next(turns)
        set_rate(optimizers[peer], rate, (done - BATCH) // step * step / samples)
        learn(models[peer], text.batch(peer))
        peers[peer].add(BATCH)
        if done % (way.every * step) == 0 or done == samples:
            weights = [own.freeze().weight for own in peers]
            length = steps_of([(weight, weight) for weight in weights], BATCH)
            for method, weight in zip(methods, weights, strict=True):
                method.load(weight)
            average_tensors(wire, methods, weights)
            for own, place, method in zip(peers, places, methods, strict=True):
                method.finish(sum(weights), counted=True)
                own.settle(counted=True)
                for anchor, mean in zip(place.state_parameters, method.averaged, strict=True):
                    anchor.grad = mean * length
                place.optimizer.step()
                place.optimizer.zero_grad()
                place.publish()
            for newcomer in setting.replaced(drawn):  # it has the anchor, and nothing of its own
                methods[newcomer].reset_own()
                optimizers[newcomer].state.clear()
    return models[0], wire


def run(way: Way, setting: Setting, rate: float, samples: int, seed: int) -> dict[str, float]:
    text = Text(setting, seed)
    train: Callable[..., tuple[Any, Wire]] = by_own_steps if way.every else by_gradients
    model, wire = train(way, setting, text, rate, samples, seed)
    figures = {"bytes": wire.sent, "brought": wire.brought, "averages": wire.averages}
    return {"loss": text.judge(model)} | {name: value / samples for name, value in figures.items()}


class Results:
    """What was computed, in a file."""

    def __init__(self, file: Path | None, samples: int, compute: bool, size: str) -> None:
        self._file, self._samples, self._compute, self._size = file, samples, compute, size
        self._found: dict[str, dict[str, float]] = json.loads(file.read_text()) if file and file.exists() else {}

    def of(self, way: Way, setting: Setting, rate: float, seed: int = 1) -> dict[str, float] | None:
        """Returns the figures of one run; None if they are not in the file and are not to be computed."""
        key = f"{way.name} | {rate:g} | {setting.name} | {self._samples} | {seed}"
        key += f" | {self._size}" * (self._size != "small")
        if key not in self._found and self._compute:
            self._found[key] = run(way, replace(setting, size=self._size), rate, self._samples, seed)
            print(key, self._found[key], flush=True)
            if self._file is not None:
                self._file.write_text(json.dumps(self._found, indent=1))
        return self._found.get(key)

    def best_rate(self, way: Way) -> float | None:
        """The rate of least loss on even data; None: not all have been tried."""
        tries = {rate: self.of(way, EVEN, rate) for rate in RATES[way.muon]}
        losses = {rate: found["loss"] for rate, found in tries.items() if found is not None}
        return min(losses, key=losses.__getitem__) if len(losses) == len(tries) else None


def screened(results: Results, ways: list[Way]) -> list[str]:
    """All ways with one seed, each with its best rate."""
    rows = ["| way to train | bytes sent for a sample | of float32 | rate | loss, even data | loss, uneven data |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    base: list[dict[str, float]] = []
    for way in ways:
        if (rate := results.best_rate(way)) is None:
            continue
        found = [each for setting in (EVEN, UNEVEN) if (each := results.of(way, setting, rate)) is not None]
        base = base or found
        losses = [
            f"{mine['loss']:.3f} ({mine['loss'] / its['loss'] - 1:+.1%})"
            for mine, its in zip(found, base, strict=False)
        ]
        losses += [""] * (2 - len(losses))
        times = base[0]["bytes"] / found[0]["bytes"]
        rows.append(
            f"| {way.name} | {found[0]['bytes']:,.0f} | 1/{times:,.0f} | {rate:g} | {losses[0]} | {losses[1]} |"
        )
    return rows


def in_full(
    results: Results, ways: list[Way], seeds: int, settings: Sequence[Setting] = tuple(SETTINGS), *, ranges: bool = True
) -> list[str]:
    """Ways on the frontier: loss beyond the first way's in the same setting, mean and range over seeds."""
    rows = ["| way to train | of float32 | " + " | ".join(setting.name for setting in settings) + " |"]
    rows.append("| --- " * (len(settings) + 2) + "|")
    base: dict[tuple[str, int], dict[str, float]] = {}
    for way in ways:
        if (rate := results.best_rate(way)) is None:
            continue
        cells, times = [], 1.0
        for setting in settings:
            beyond = []
            for seed in range(1, seeds + 1):
                if (found := results.of(way, setting, rate, seed)) is None:
                    continue
                first = base.setdefault((setting.name, seed), found)
                beyond.append(found["loss"] / first["loss"] - 1)
                times = first["bytes"] / found["bytes"] if setting is EVEN else times
            mean = sum(beyond) / max(1, len(beyond))
            spread = f" ({min(beyond):+.1%} to {max(beyond):+.1%})" if ranges and len(beyond) > 1 else ""
            cells.append(f"{mean:+.1%}{spread}" if beyond else "")
        rows.append(f"| {way.name} | 1/{times:,.0f} | " + " | ".join(cells) + " |")
    return rows


# The picture: each family of ways is a line of one colour.

WIDTH, HEIGHT, MARGIN = 720, 380, 60
LOWEST, HIGHEST, FEWEST = -0.15, 0.35, 1 / 3000  # loss beyond the first way's; bytes of the first way's
COLOURS = {
    "synchronous": "#222222", "PowerSGD and PowerEF": "#a0a0a0", "outer steps, Nesterov": "#e377c2",
    "outer steps, plain means": "#1f77b4", "Muon, outer steps, Nesterov": "#ff9896",
    "Muon, outer steps, plain means": "#d62728", "top k": "#2ca02c", "Muon, top k": "#98df8a",
}  # fmt: skip


def family(way: Way) -> str:
    muon = "Muon, " if way.muon and way.every else ""
    if " top " in way.name:
        return f"{muon}top k"
    if "Power" in way.name:
        return "PowerSGD and PowerEF"
    if not way.every:
        return "synchronous"
    return f"{muon}outer steps, {'Nesterov' if 'Nesterov' in way.name else 'plain means'}"


def picture(results: Results, ways: list[Way]) -> str:
    """Bytes of float32 gradients against the loss beyond theirs, on even data."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 2 * MARGIN} {HEIGHT + 2 * MARGIN + 50}"',
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH + 2 * MARGIN}" height="{HEIGHT + 2 * MARGIN + 50}" fill="white"/>',
    ]

    def across(share: float) -> float:
        return MARGIN + WIDTH * math.log(share) / math.log(FEWEST)

    def down(beyond: float) -> float:
        return MARGIN + HEIGHT * (HIGHEST - min(beyond, HIGHEST)) / (HIGHEST - LOWEST)

    for percent in range(-10, 35, 10):
        y, colour = down(percent / 100), "#888" if not percent else "#e4e4e4"
        parts.append(f'<line x1="{MARGIN}" x2="{MARGIN + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{percent:+d}%</text>')
    for times in (1, 10, 100, 1000):
        x = across(1 / times)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{MARGIN}" y2="{MARGIN + HEIGHT}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x:.1f}" y="{MARGIN + HEIGHT + 16}" text-anchor="middle" fill="#555">1/{times}</text>')
    lines: dict[str, list[tuple[float, float, str]]] = {name: [] for name in COLOURS}
    base: dict[str, float] = {}
    for way in ways:
        rate = results.best_rate(way)
        found = results.of(way, EVEN, rate) if rate is not None else None
        if found is None:
            continue
        base = base or found
        label = (
            f"{way.every}" if way.every else way.name.removeprefix("synchronous").strip(", ").removesuffix(" of rank 4")
        )
        lines[family(way)].append((found["bytes"] / base["bytes"], found["loss"] / base["loss"] - 1, label))
    for index, (name, points) in enumerate(lines.items()):
        colour = COLOURS[name]
        if "outer" in name or "top" in name:
            path = " ".join(f"{across(share):.1f},{down(beyond):.1f}" for share, beyond, _ in sorted(points))
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
        for share, beyond, label in points:
            x, y = across(share), down(beyond)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')
            parts.append(f'<text x="{x + 5:.1f}" y="{y - 5:.1f}" fill="{colour}">{label}</text>')
        x, y = MARGIN + index % 4 * 190, MARGIN + HEIGHT + 44 + index // 4 * 18
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="3.5" fill="{colour}"/><text x="{x + 9}" y="{y}">{name}</text>')
    title = (
        "loss beyond synchronous float32 with AdamW, by bytes sent for a sample; numbers: own steps between two rounds"
    )
    return "\n".join([*parts, f'<text x="{MARGIN}" y="{MARGIN - 24}">{title}</text>', "</svg>"]) + "\n"


FRONTIER = (
    PLAIN, "outer steps, every 15, 4 bits", "synchronous with Muon", "Muon, outer steps, every 5, 4 bits",
    "Muon, outer steps, every 15, 4 bits", "Muon, outer steps, every 50, 4 bits",
    "Muon, outer steps, every 15, top 256 in 2 bits", "Muon, outer steps, every 150, 4 bits",
)  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--seeds", type=int, default=3, help="of the frontier")
    parser.add_argument("--page", type=Path, help="between whose marks a short table of the frontier is written")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg")
    parser.add_argument("--known", action="store_true", help="compute nothing")
    parser.add_argument("--only", nargs="+", metavar="WAY", help="of the ways, by name")
    parser.add_argument("--medium", action="store_true")
    arguments = parser.parse_args()
    size = "medium" if arguments.medium else "small"
    results = Results(arguments.keep, arguments.samples, not arguments.known, size)
    all_ways = [way for way in ways() if way.name in (arguments.only or (way.name,))]
    named = {way.name: way for way in all_ways}
    if arguments.picture is not None:
        arguments.picture.write_text(picture(results, all_ways))
    print("\n".join(screened(results, all_ways)))
    if arguments.medium:
        return
    frontier = [named[name] for name in FRONTIER if name in named]
    print("\n".join(in_full(results, frontier, arguments.seeds)))
    if arguments.page is not None:
        text = "\n".join(in_full(results, frontier, arguments.seeds, (EVEN, MANY, CHURN), ranges=False))
        before, _, rest = arguments.page.read_text().partition("<!-- frontier -->\n")
        after = rest.partition("<!-- end -->")[2]
        arguments.page.write_text(f"{before}<!-- frontier -->\n{text}\n<!-- end -->{after}")


if __name__ == "__main__":
    main()
