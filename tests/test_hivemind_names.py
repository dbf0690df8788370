"""Scripts for hivemind hear what its arguments are called here."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import swarmcli
from swarmcli.hivemind_names import NEW_WORDS


@pytest.mark.parametrize(
    ("make", "arguments", "words"),
    [
        (swarmcli.Optimizer, {"use_local_updates": True}, "use_local_updates is here grad_averager=None"),
        (swarmcli.DHT, {"host_maddrs": ["/ip4/0.0.0.0/tcp/0"]}, "host_maddrs is here host and port"),
        (swarmcli.DHT, {"use_relay": True}, "use_relay is here nothing; leave it out"),
        (swarmcli.DecentralizedAverager, {"averaging_expiration": 5}, "is here min_matchmaking_time"),
        (swarmcli.GradientAverager, {"compression_type": 1}, "compression_type is here compression"),
    ],
)
def test_the_error_gives_the_new_word(make: Any, arguments: dict[str, Any], words: str) -> None:
    dht, weights = swarmcli.DHT(start=False), [torch.zeros(1, requires_grad=True)]
    usual: dict[Any, dict[str, Any]] = {
        swarmcli.DHT: {"start": False},
        swarmcli.DecentralizedAverager: {"averaged_tensors": [], "dht": dht, "prefix": "p", "start": False},
        swarmcli.GradientAverager: {"parameters": weights, "dht": dht, "prefix": "p", "start": False},
        swarmcli.Optimizer: {"dht": dht},
    }
    with pytest.raises(TypeError, match=rf"{words}.*docs/coming-from-hivemind\.md"):
        make(**usual[make], **arguments)


def test_no_argument_of_ours_is_taken_for_one_of_theirs() -> None:
    for name, words in NEW_WORDS.items():
        assert not words.keys() & inspect.signature(getattr(swarmcli, name)).parameters.keys()
