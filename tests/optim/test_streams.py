"""A loop that computes on a CUDA stream of its own, and what the Optimizer does on the device's default stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import swarmcli
from swarmcli.optim import optimizer as module
from swarmcli.optim.optimizer import in_order

GPU = torch.device("cuda", 0)


@dataclass(eq=False)
class Stream:
    """Keeps what it was given, in order; an event is the stream and how much it had been given by then."""

    name: str
    given: list[Any] = field(default_factory=list)

    def record_event(self) -> tuple[Stream, int]:
        return self, len(self.given)

    def wait_event(self, event: tuple[Stream, int]) -> None:
        self.given.append(event)

    def before(self) -> set[str]:
        """All that is done when this stream is, also on streams that it has waited for."""
        done: set[str] = set()
        for each in self.given:
            done |= Stream("", each[0].given[: each[1]]).before() if isinstance(each, tuple) else {each}
        return done


class Cuda:
    def __init__(self, own: Stream | None = None) -> None:
        self.default = Stream("default")
        self.own = own or self.default

    def current_stream(self, device: torch.device) -> Stream:
        assert device == GPU
        return self.own

    def default_stream(self, device: torch.device) -> Stream:
        return self.default


def test_both_streams_wait_for_each_other() -> None:
    cuda = Cuda(Stream("loop's own"))
    cuda.own.given.append("backward")
    with in_order([GPU], cuda):
        assert cuda.default.before() == {"backward"}
        cuda.default.given.append("step")
    assert cuda.own.before() == {"backward", "step"}


def test_every_call_of_the_optimizer_is_in_order(dht: swarmcli.DHT, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(Stream("loop's own"))

    def on_the_double(devices: Any) -> Any:
        assert not devices, "the parameters are on the CPU"
        return in_order([GPU], cuda)

    parameter = torch.nn.Parameter(torch.zeros(2))
    monkeypatch.setattr(module, "in_order", on_the_double)
    made = torch.optim.SGD([parameter], lr=0.1)
    with swarmcli.Optimizer(dht=dht, run_id="run", target_batch_size=4, optimizer=made) as optimizer:
        for call in (
            lambda: optimizer.step(batch_size=1),
            optimizer.load_state_from_peers,
            optimizer.state_dict,
            lambda: optimizer.load_state_dict(optimizer.state_dict()),
        ):
            parameter.grad = torch.ones(2)
            waits = len(cuda.default.given), len(cuda.own.given)
            call()
            assert len(cuda.default.given) > waits[0] and len(cuda.own.given) > waits[1]
