"""Two sketches give the true distance, as closely as 16 buckets allow, whatever the difference looks like."""

import math

import numpy as np
import pytest
import torch

from swarmcli.optim.state.drift import SKETCH_BYTES, Sketcher, distance

# Of a length estimated from 16 buckets with eight seeds: five standard deviations, and a little for structure.
LOW, HIGH = 0.5, 1.6
PATTERNS = ("noise", "constant", "one element", "one row", "one column", "outer product")


def pattern(kind: str, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """A difference between two copies of a tensor."""
    if kind == "noise":
        return torch.randn(shape, generator=generator)
    if kind == "constant" or not shape:
        return torch.ones(shape)
    tensor = torch.zeros(shape)
    if kind == "one element":
        tensor.view(-1)[int(torch.randint(tensor.numel(), (), generator=generator))] = 1.0
    elif kind == "one row":
        tensor[0] = 1.0
    elif kind == "one column":
        tensor[..., 0] = 1.0
    else:
        left = torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator)
        tensor += left * torch.randn(shape[-1], generator=generator)
    return tensor


def length(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


@pytest.mark.parametrize("kind", PATTERNS)
def test_large_matrices_are_told_apart_as_well(kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    ratios = []
    for seed in range(20):
        difference = pattern(kind, [160, 1000], generator)
        ratios.append(np.linalg.norm(Sketcher(bytes([seed])).sketch([difference])) / length([difference]))
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.06)
    assert min(ratios) > LOW
    assert max(ratios) < HIGH


def test_it_is_linear_and_depends_on_the_seed_and_the_order_only() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(9000, generator=generator, dtype=torch.float64) for _ in range(2))
    sketcher = Sketcher(b"run")
    difference = sketcher.sketch([a - b])
    assert distance(sketcher.sketch([a]), sketcher.sketch([b])) == pytest.approx(np.linalg.norm(difference), rel=1e-5)
    assert np.array_equal(sketcher.sketch([a]), Sketcher(b"run").sketch([a.view(90, 100)]))
    assert not np.array_equal(sketcher.sketch([a]), Sketcher(b"another run").sketch([a]))
    assert not np.array_equal(sketcher.sketch([a, b]), sketcher.sketch([b, a]))
    assert len(sketcher.sketch([a]).tobytes()) == SKETCH_BYTES


def test_what_is_not_finite_shows() -> None:
    sketcher = Sketcher(b"")
    assert np.isfinite(sketcher.sketch([torch.ones(5)])).all()
    assert not np.isfinite(sketcher.sketch([torch.tensor([1.0, math.nan])])).all()
    assert not np.isfinite(sketcher.sketch([torch.tensor([1.0, math.inf])])).all()
    assert not np.isfinite(sketcher.sketch([torch.full((3,), 1e300, dtype=torch.float64)])).all()
