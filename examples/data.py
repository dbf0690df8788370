"""What the examples learn, made on the spot: nothing is downloaded, and every peer draws samples of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

FEATURES, CLASSES = 16, 4


def clusters(batch_size: int, batches: int | None, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields `batches` batches of points around one centre for each class: (batch_size, FEATURES), and their classes,
    (batch_size,). `batches` None: without end.

    The centres are the same for everyone. Two peers draw the same points only if they have the same `seed`.
    """
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    own = torch.Generator().manual_seed(seed)
    for _ in itertools.count() if batches is None else range(batches):
        classes = torch.randint(CLASSES, (batch_size,), generator=own)
        yield centres[classes] + torch.randn(batch_size, FEATURES, generator=own), classes


def classifier() -> torch.nn.Module:
    """A small network. Peers may begin with different weights: all but the first take over those of the run."""
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES))
