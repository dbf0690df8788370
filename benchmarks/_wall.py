"""The training that this project and hivemind run alike in benchmarks/wall.py. Needs nothing but torch.

The first trainer keeps the model after each epoch, so that its loss is computed when nobody waits for it.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

TRAINERS, BATCH, CONTEXT, BYTES = 3, 8, 64, 256
LAYERS, WIDTH, HEADS = 6, 384, 6  # 10.9 million parameters


@dataclass(frozen=True)
class Work:
    """What a trainer does. `every`: batches of each trainer between two rounds."""

    way: str
    folder: str  # where trainers find each other, and the first one keeps its models
    every: int
    rate: float
    seconds: float  # after which it ends
    epochs: int  # or after so many
    index: int = 0
    host: str = ""

    @property
    def target(self) -> int:
        return TRAINERS * BATCH * self.every

    @property
    def place(self) -> Path:
        return Path(self.folder)

    @classmethod
    def read(cls) -> Work:
        return cls(**json.loads(sys.argv[1]))

    def told(self) -> str:
        return json.dumps(asdict(self))


class ByteGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, BYTES)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Nats per byte of windows of CONTEXT + 1 bytes."""
        seen = self.tokens(windows[:, :-1]) + self.places.weight
        guessed = self.out(self.layers(seen, mask=self.mask, is_causal=True))
        return functional.cross_entropy(guessed.flatten(0, 1), windows[:, 1:].flatten())


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Python's own sources, as bytes: the text to train on, and the text to judge by."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:120]
    read = [
        torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        for path in paths
        if path.stat().st_size
    ]
    return torch.cat([text for index, text in enumerate(read) if index % 10]), torch.cat(read[::10])


def windows(text: torch.Tensor, samples: int, drawn: torch.Generator) -> torch.Tensor:
    begins = torch.randint(len(text) - CONTEXT, (samples, 1), generator=drawn)
    return text[begins + torch.arange(CONTEXT + 1)]


def meet(work: Work, name: str, value: Any) -> list[Any]:
    """Writes `value` for the others, waits until all have written theirs, and returns all values in the order of the
    trainers."""
    whole = work.place / f"{name}-{work.index}.json"
    part = whole.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.rename(whole)
    files = [work.place / f"{name}-{index}.json" for index in range(TRAINERS)]
    while not all(file.exists() for file in files):
        time.sleep(0.05)
    return [json.loads(file.read_text()) for file in files]


def train(optimizer: Any, model: ByteGPT, work: Work) -> None:
    """Trains until its seconds or its epochs are over. The first trainer keeps the model and the seconds of each
    epoch."""
    learned, _ = texts()
    drawn = torch.Generator().manual_seed(work.index)
    meet(work, "ready", True)
    began, spent, epoch = time.perf_counter(), 0.0, optimizer.local_epoch
    while (now := time.perf_counter() - began) < work.seconds and optimizer.local_epoch < work.epochs:
        optimizer.zero_grad()
        model.loss(windows(learned, BATCH, drawn)).backward()
        optimizer.step(batch_size=BATCH)
        if work.index == 0 and optimizer.local_epoch != epoch:
            now, epoch = time.perf_counter() - began - spent, optimizer.local_epoch
            torch.save((now, epoch, model.state_dict()), work.place / f"epoch{epoch:05}.pt")
            spent += time.perf_counter() - began - spent - now
    (work.place / f"ended-{work.index}").touch()


def judged(work: Work, samples: int = 256) -> list[tuple[float, int, float]]:
    """(seconds, epoch, nats per byte) of every model that was kept."""
    model, found = ByteGPT(), []
    judging = windows(texts()[1], samples, torch.Generator().manual_seed(0))
    for file in sorted(work.place.glob("epoch*.pt")):
        seconds, epoch, state = torch.load(file, weights_only=True)
        model.load_state_dict(state)
        with torch.no_grad():
            losses = [float(model.loss(part)) for part in judging.split(64)]
        found.append((seconds, epoch, sum(losses) / len(losses)))
    return found
