"""HierarchicalModelAverager over a swarm, from programs without coroutines, on loopback."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarmcli import DHT
from swarmcli.sharding import HierarchicalModelAverager, SwarmGroups
from tests.optim.shells import at_once, dhts

LEVELS = {2: 4, 4: None}


@pytest.fixture
def tables() -> Iterator[list[DHT]]:
    with dhts(2) as made:
        yield made


def over_swarm(dht: Any, levels: Any = None, **options: Any) -> HierarchicalModelAverager:
    groups = SwarmGroups(**{"dht": dht, "prefix": "run", "place": "here", "matchmaking_time": 20.0, **options})
    return HierarchicalModelAverager(LEVELS if levels is None else levels, swarm=groups)


def layer(value: float, *, gradient: bool = True) -> torch.nn.Linear:
    made = torch.nn.Linear(2, 1)
    for param in made.parameters():
        param.data.fill_(value)
        param.grad = torch.zeros_like(param) if gradient else None
    return made


def values(module: torch.nn.Module) -> list[float]:
    return [param.flatten()[0].item() for param in module.parameters()]


def test_two_peers(tables: list[DHT]) -> None:
    layers = [layer(1.0), layer(3.0)]
    layers[0].bias.grad = layers[1].bias.grad = None
    with over_swarm(tables[0]) as one, over_swarm(tables[1]) as two:
        for step, group in enumerate(["everyone", None, "here", None, "everyone"]):
            layers[0].weight.data.fill_(1.0)
            layers[1].weight.data.fill_(3.0)
            optimizer = torch.optim.SGD(layers[1].parameters(), lr=0.1)
            results = at_once(
                lambda: one.average_parameters(layers[0].parameters()),
                lambda optimizer=optimizer: two.average_parameters(optimizer.param_groups),
            )
            assert [result and (result.group, result.members, result.step) for result in results] == [
                group and (group, 2, step)
            ] * 2
            assert [values(each) for each in layers] == [[2.0, 1.0], [2.0, 3.0]] if group else [[1.0, 1.0], [3.0, 3.0]]
        assert (one.step, two.step) == (5, 5)
        with pytest.raises(RuntimeError, match="groups of a swarm form anew"):
            _ = one.period_process_group_dict


def test_a_newcomer_goes_on_where_the_others_are(tables: list[DHT]) -> None:
    layers = [layer(1.0), layer(3.0)]
    with over_swarm(tables[0]) as one:
        with over_swarm(tables[1]) as two:
            one.load_state_dict({"step": 8})
            at_once(
                *(
                    lambda a=a, m=m: a.average_parameters(m.parameters())
                    for a, m in zip((one, two), layers, strict=True)
                )
            )
            assert one.state_dict() == two.state_dict() == {"step": 9}
        newcomer = layer(50.0, gradient=False)
        with over_swarm(tables[1]) as again:
            deadline = time.monotonic() + 120.0  # an offer comes round a moment after its donor's start
            while not again.load_state_from_peers(newcomer.parameters(), timeout=120.0):
                assert time.monotonic() < deadline
            assert again.step == 8
            assert values(newcomer) == [2.0, 2.0]


def test_what_is_no_state() -> None:
    averager = over_swarm_without_network()
    for wrong, kind in (({}, ValueError), ({"step": -1}, ValueError), ({"step": "4"}, TypeError)):
        with pytest.raises(kind, match="step"):
            averager.load_state_dict(wrong)
    averager.step = 12
    assert averager.step == 12
    assert repr(averager) == "<HierarchicalModelAverager {2: 4, 4: None} at step 12>"
    averager.shutdown()


def over_swarm_without_network() -> HierarchicalModelAverager:
    return over_swarm(SimpleNamespace(client_mode=False, is_alive=lambda: True))


@pytest.mark.parametrize(
    ("levels", "options", "words"),
    [
        ({2: 4}, {}, "place='here' has 1 names for 1 levels; give one for each level but the last"),
        ({2: 4, 4: 8, 8: 9}, {}, "the widest first, as 'europe/paris'"),
        (None, {"place": "a//b"}, "not empty"),
        ({2: 1, 4: 4}, {}, "has groups of 1; a group of a swarm has at least 2 members"),
    ],
)
def test_groups_that_make_no_sense(levels: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        over_swarm(SimpleNamespace(client_mode=False), levels, **options)


def test_what_cannot_work_says_so() -> None:
    with pytest.raises(RuntimeError, match="make it with start=True"):
        over_swarm(DHT(start=False))
    groups = SwarmGroups(dht=SimpleNamespace(client_mode=False, is_alive=lambda: True), prefix="run")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=re.escape("place=('europe',): expected a text such as 'europe/paris'")):
        over_swarm(SimpleNamespace(client_mode=False), place=("europe",))
    with pytest.raises(ValueError, match="process_group and swarm are given"):
        HierarchicalModelAverager({2: 4}, 0, object(), swarm=groups)  # type: ignore[arg-type]
    averager = over_swarm_without_network()
    averager.shutdown()
    averager.shutdown()
    with pytest.raises(RuntimeError, match="not running"):
        averager.average_parameters(layer(1.0).parameters())
