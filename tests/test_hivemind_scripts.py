"""What scripts and tests written for hivemind and for torch call, by the names that they call it by."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pydantic
import pytest
import torch
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

import swarmcli
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.compression import (
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    SizeAdaptiveCompression,
    extract,
)
from swarmcli.dht.records import OwnedSubkey
from swarmcli.dht.schema import SchemaValidator, SignatureValidator
from swarmcli.hivemind_names import NEW_WORDS
from swarmcli.network.identity import Identity
from swarmcli.testing import virtual_time
from tests.averaging.averagers import Averagers, all_results

CODECS = [NoCompression(), Float16Compression(), Quantile8BitQuantization()]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_tensors_come_back_as_they_were(codec: Any) -> None:
    for dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.int64):
        tensor = torch.randn(100).to(dtype)
        restored = extract(codec.compress(tensor))
        assert (restored.dtype, restored.requires_grad) == (dtype, False)
        if not dtype.is_floating_point:
            assert torch.equal(restored, tensor)
    for tensor in (torch.randn(100, requires_grad=True), torch.nn.Parameter(torch.randn(20, 5))):
        restored = extract(codec.compress(tensor))
        assert restored.requires_grad and restored.is_leaf and restored.shape == tensor.shape
        torch.testing.assert_close(restored, tensor, rtol=0, atol=0.1, check_stride=False)
    whole = torch.randn(3, 100, dtype=torch.complex64)
    for view in (whole.t(), whole.conj(), whole[:, ::2]):
        assert torch.equal(extract(codec.compress(view)), view)


@pytest.mark.parametrize("kind", [NoCompression, SizeAdaptiveCompression])
def test_a_codec_whose_own_methods_would_not_be_called_is_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"Own.*not be called; derive .*from CompressionBase"):
        type("Own", (kind,), {"compress": lambda self, tensor, info=None: None})


def test_verbose_shows_progress_where_nothing_set_up_logging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # those of pytest
    weights = torch.ones(1, requires_grad=True)
    given = {"run_id": "told", "target_batch_size": 4, "optimizer": torch.optim.SGD([weights], 0.1)}
    try:
        with swarmcli.DHT(start=True, host="127.0.0.1") as dht, swarmcli.Optimizer(dht=dht, verbose=True, **given):
            logging.getLogger("swarmcli.optim.peers.progress").info("3 of 4 samples")
        assert "3 of 4 samples" in capsys.readouterr().err
    finally:
        logging.getLogger("swarmcli.optim").setLevel(logging.NOTSET)


def test_a_tracker_says_whether_it_lives() -> None:
    with swarmcli.DHT(start=True, host="127.0.0.1") as dht:
        tracker = swarmcli.ProgressTracker(dht, "run", 8, start=False)
        assert not tracker.is_alive()
        tracker.run_in_background()
        assert tracker.is_alive()
        tracker.shutdown()
        assert not tracker.is_alive()


class _Numbers(pydantic.BaseModel):
    number: int


class _Words(pydantic.BaseModel):
    word: str


def test_schemas_are_merged_in_place() -> None:
    numbers, words = (SchemaValidator(model, allow_extra_keys=False) for model in (_Numbers, _Words))
    assert numbers.merge_with(words)
    assert not numbers.merge_with(SignatureValidator())
    with swarmcli.DHT(start=True, host="127.0.0.1", record_validators=[numbers]) as dht:
        soon = swarmcli.get_dht_time() + 60
        assert dht.store("number", 1, soon) and dht.store("word", "a", soon)
        assert not dht.store("word", 1, soon) and not dht.store("third", 1, soon)


def test_nobody_stores_under_the_subkey_of_another(caplog: pytest.LogCaptureFixture) -> None:
    stranger = Identity.generate()
    with swarmcli.DHT(start=True, host="127.0.0.1") as dht:
        theirs, soon = OwnedSubkey(stranger.peer_id, b"name"), swarmcli.get_dht_time() + 60
        assert dht.store("key", 1, soon, subkey=dht.own_subkey())
        assert dht.store("key", 1, soon, subkey=theirs) is False
        assert dht.store("key", 1, soon, subkey=theirs, return_future=True).result() is False
        assert stranger.peer_id.short in caplog.text
        found = dht.get("key")
        assert found is not None and set(found.value) == {dht.own_subkey()}


def test_a_start_is_waited_for() -> None:
    dht = swarmcli.DHT(["tcp://192.0.2.1:9"], start=True, await_ready=False, host="127.0.0.1")
    with pytest.raises(TimeoutError):
        dht.wait_until_ready(timeout=0.01)
    dht.shutdown()
    for gone in (dht, swarmcli.DHT(start=False)):
        with pytest.raises(RuntimeError):
            gone.wait_until_ready()
    with swarmcli.DHT(start=True, await_ready=False, host="127.0.0.1") as here:
        here.wait_until_ready()
        assert here.is_alive()


def test_the_names_of_its_optimizers_schedulers() -> None:
    from swarmcli.optim.state_averager import LRSchedulerBase

    class Still(LRSchedulerBase):
        def get_lr(self) -> list[Any]:
            return [group["lr"] for group in self.optimizer.param_groups]

    still = Still(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5))
    assert still.get_lr() == [0.5] and isinstance(still, torch.optim.lr_scheduler.LRScheduler)


def test_torch_takes_the_hierarchical_averager_for_a_model_averager() -> None:
    assert issubclass(swarmcli.HierarchicalModelAverager, ModelAverager)
    assert isinstance(inspect.getattr_static(swarmcli.HierarchicalModelAverager, "process_group"), property)


@pytest.mark.parametrize(("trust", "mean"), [("members", (0 + 1 + 2 + 3000) / 1003), ("strangers", 2.5)])
def test_among_members_that_are_trusted_weights_count_in_full(trust: Any, mean: float) -> None:
    async def main() -> None:
        async with Averagers(1) as swarm:
            peers = await swarm.add(4, allreduce=AllreduceOptions(sender_timeout=5.0, trust=trust))
            for _ in range(5):  # the first rounds have no ramps, later ones do
                for number, peer in enumerate(peers):
                    peer.core._tensors[0].fill_(float(number))
                weights = [1.0, 1.0, 1.0, 1000.0]
                await all_results([peer.begin(weight=w) for peer, w in zip(peers, weights, strict=True)])
                assert [peer.values[0] for peer in peers] == pytest.approx([mean] * 4)

    virtual_time.run(main(), seed=1, timeout=600)


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
