"""DecentralizedAverager over TCP: several peers in one process, each with a DHT of its own."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from swarmcli import DHT, DecentralizedAverager
from swarmcli.averaging import AveragingMode, AveragingStage
from swarmcli.compression import (
    CompressionInfo,
    Float16Compression,
    PerTensorCompression,
    RoleAdaptiveCompression,
    TensorRole,
    Uniform8BitQuantization,
)
from swarmcli.events import RoundFinished

PATIENCE = 120.0  # seconds, for a busy machine


@contextmanager
def swarm(count: int, *, clients: int = 0, **options: Any) -> Iterator[list[DecentralizedAverager]]:
    """Averagers whose tensors are full of their number; the last `clients` of them are in client mode."""
    with ExitStack() as stack:
        averagers: list[DecentralizedAverager] = []
        for number in range(count):
            first = averagers[0].dht.get_visible_addresses() if averagers else None
            dht = DHT(first, start=True, host="127.0.0.1", client_mode=number >= count - clients)
            stack.callback(dht.shutdown)
            tensors = [torch.full((50, 7), float(number)), torch.full((3,), float(number), dtype=torch.float64)]
            averagers.append(
                stack.enter_context(DecentralizedAverager(tensors, dht, start=True, prefix="test", **options))
            )
        yield averagers


def average(averagers: list[DecentralizedAverager], **options: Any) -> list[Any]:
    controls = [averager.step(wait=False, timeout=120, **options) for averager in averagers]
    return [control.result(120) for control in controls]


def load(averager: DecentralizedAverager) -> tuple[Any, list[torch.Tensor]]:
    """The state that others share. They tell of it some time after the call that allows it, so this tries again."""
    deadline = time.monotonic() + PATIENCE
    while (loaded := averager.load_state_from_peers(timeout=PATIENCE)) is None:
        assert time.monotonic() < deadline
    return loaded


def first_values(averager: DecentralizedAverager) -> list[float]:
    with averager.get_tensors() as tensors:
        return [float(tensor.flatten()[0]) for tensor in tensors]


LIVES_ON = """
import sys, threading, torch, swarmcli
dht = swarmcli.DHT(start=True, host="127.0.0.1")
averager = swarmcli.DecentralizedAverager([torch.ones(3)], dht, start=True, prefix="x", daemon={daemon})
def later():
    threading.main_thread().join()
    print("alive" if averager.is_alive else "gone", flush=True)
    sys.stdin.readline()
    averager.shutdown()
threading.Thread(target=later, daemon=True).start()
"""


@pytest.mark.e2e
@pytest.mark.parametrize(("daemon", "words"), [(False, "alive"), (True, "")])
def test_daemon_false_keeps_the_process_until_shutdown(daemon: bool, words: str) -> None:
    command = [sys.executable, "-c", LIVES_ON.format(daemon=daemon)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        if words:
            assert process.stdout.readline().strip() == words
            assert process.poll() is None
        process.stdin.close()
        assert process.wait(120) == 0


def test_tensors_that_cannot_be_averaged_in_place_are_refused_at_once() -> None:
    dht, zeros = DHT(start=False), torch.zeros(4)
    for tensors, error, words in [
        ([zeros, zeros], ValueError, r"averaged_tensors\[0\] and \[1\] share memory"),
        ([torch.zeros(2), zeros[1:], zeros[:3]], ValueError, r"\[1\] and \[2\] share memory"),
        ([torch.zeros(1).expand(4)], ValueError, r"\[0\] is expanded"),
        (zeros, TypeError, "put it in a list"),
        ([zeros, [1.0]], TypeError, r"averaged_tensors\[1\] must be a tensor, got list"),
    ]:
        with pytest.raises(error, match=words):
            DecentralizedAverager(tensors, dht, start=False, prefix="x")  # type: ignore[arg-type]
    DecentralizedAverager([zeros[:2], zeros[2:], torch.zeros(0), torch.ones(3, 2).T], dht, start=False, prefix="x")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_group_size": "a"}, "target_group_size must be a number or None, got 'a'"),
        ({"initial_group_bits": 3}, "initial_group_bits must be a text, got 3"),
        ({"min_matchmaking_time": "5"}, "min_matchmaking_time must be a number, got '5'"),
        ({"bandwidth": "fast"}, "bandwidth must be a number or None, got 'fast'"),
        ({"averaging_alpha": "a"}, "averaging_alpha must be a number, got 'a'"),
        ({"next_chunk_timeout": "1"}, "sender_timeout must be a number or None, got '1'"),
        ({"compression": "float16"}, "compression must be a codec"),
        ({"shutdown_timeout": None}, "shutdown_timeout must be a number, got None"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        DecentralizedAverager([torch.zeros(4)], DHT(start=False), start=False, prefix="x", **options)


def test_a_round_that_would_wait_for_its_own_thread_or_for_a_dead_table_is_refused() -> None:
    with swarm(1) as (averager,):
        with averager.get_tensors(), pytest.raises(RuntimeError, match="leave get_tensors"):
            averager.step(timeout=1)
        averager.dht.shutdown()
        with pytest.raises(RuntimeError, match="has been shut down"):
            averager.step(timeout=1)


def test_three_peers_one_of_them_behind_a_firewall() -> None:
    with swarm(3, clients=1) as averagers:
        heard: list[RoundFinished] = []
        averagers[0].dht.events.subscribe(
            lambda event: heard.append(event) if isinstance(event, RoundFinished) else None
        )
        for _ in range(2):
            results = average(averagers, gather="note")
            assert [dict(result) for result in results] == [{each.peer_id: "note" for each in averagers}] * 3
        assert [first_values(averager) for averager in averagers] == [[1.0, 1.0]] * 3
        assert [event.outcome for event in heard] == ["committed", "committed"]
        assert [averager.mode for averager in averagers] == [AveragingMode.NODE] * 2 + [AveragingMode.CLIENT]
        assert all(averager.is_alive for averager in averagers)
        assert averagers[0].total_size == 353
    assert not any(averager.is_alive for averager in averagers)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("swarm")]


def test_waiting_trigger_weight_and_failure() -> None:
    with swarm(2) as (one, other):
        assert one.step(timeout=0.5) is None  # nobody else came
        with pytest.raises(ValueError, match="require_trigger"):
            one.step(require_trigger=True)
        controls = [each.step(wait=False, require_trigger=True, timeout=120) for each in (one, other)]
        controls[0].begun.result(120)
        controls[0].weight = 3.0
        for control in controls:
            control.allow_allreduce()
        assert controls[0].result(120).total_weight == 4.0
        controls[1].result(120)
        assert first_values(one) == first_values(other) == [0.25, 0.25]
        assert controls[0].stage is AveragingStage.FINISHED


class WithMetadata(DecentralizedAverager):
    def get_current_state(self) -> tuple[Any, list[torch.Tensor]]:
        return {"epoch": 5}, [torch.arange(4)]


def test_state_is_loaded_from_whoever_shares_it() -> None:
    with swarm(2, declare_state_period=1.0) as (one, other):
        other.state_sharing_priority = 3.0
        assert other.state_sharing_priority == 3.0
        metadata, tensors = load(one)
        assert metadata is None
        assert [float(tensor.flatten()[0]) for tensor in tensors] == [1.0, 1.0]
        with (
            WithMetadata([torch.zeros(1)], other.dht, start=True, prefix="more"),
            DecentralizedAverager([torch.zeros(1)], one.dht, start=True, prefix="more") as newcomer,
        ):
            load(newcomer)
            metadata, tensors = newcomer.load_state_from_peers(wait=False, timeout=120).result(120) or (None, [])
            assert metadata == {"epoch": 5} and torch.equal(tensors[0], torch.arange(4))


class Live(DecentralizedAverager):
    """Shares what it averages and a counter, which goes on counting in place."""

    def get_current_state(self) -> tuple[Any, list[torch.Tensor]]:
        self.counter = torch.zeros(200_000)
        state = [self.counter, *super().get_current_state()[1]]
        threading.Thread(target=lambda: [self.counter.add_(1) for _ in range(2000)]).start()
        return None, state


class OfThree(DecentralizedAverager):
    def get_current_state(self) -> tuple[Any, ...]:  # type: ignore[override]
        return None, [], []


def test_what_is_shared_is_copied_when_it_is_asked_for() -> None:
    with (
        swarm(2) as (first, second),
        Live([torch.ones(5)], first.dht, start=True, prefix="live") as donor,
        DecentralizedAverager([torch.zeros(5)], second.dht, start=True, prefix="live") as newcomer,
    ):
        for value in range(3):
            with donor.get_tensors() as tensors:
                tensors[0].fill_(value)
            _, loaded = load(newcomer)
            assert torch.equal(loaded[1], torch.full((5,), float(value)))


def test_sharing_is_a_property() -> None:
    with swarm(2) as (first, second):
        donor = DecentralizedAverager([torch.ones(5)], first.dht, start=False, prefix="p", allow_state_sharing=False)
        donor.state_sharing_priority = 2.5
        donor.allow_state_sharing = True  # before it is started, and later
        with donor, DecentralizedAverager([torch.zeros(5)], second.dht, start=True, prefix="p") as newcomer:
            assert (donor.allow_state_sharing, donor.state_sharing_priority) == (True, 2.5)
            assert load(newcomer)
            donor.allow_state_sharing = False
            assert newcomer.load_state_from_peers(timeout=120) is None
            donor.allow_state_sharing = True
            assert load(newcomer)
            with pytest.raises(TypeError, match="allow_state_sharing='no': expected True or False"):
                donor.allow_state_sharing = "no"  # type: ignore[assignment]
            with pytest.raises(ValueError, match="state_sharing_priority=nan"):
                donor.state_sharing_priority = float("nan")
        donor.allow_state_sharing = False  # nobody is there any more whom it would concern


def test_a_state_of_another_form_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with (
        swarm(2) as (first, second),
        OfThree([torch.ones(5)], first.dht, start=True, prefix="three"),
        DecentralizedAverager([torch.zeros(5)], second.dht, start=True, prefix="three") as newcomer,
    ):
        deadline = time.monotonic() + PATIENCE
        while "get_current_state() must return (metadata, tensors), got 3 values" not in caplog.text:
            assert newcomer.load_state_from_peers(timeout=120) is None
            assert time.monotonic() < deadline


def test_tensors_and_states_travel_compressed() -> None:
    like = (torch.zeros(50, 7), torch.zeros(3, dtype=torch.float64))
    infos = [CompressionInfo.from_tensor(tensor, key="w", role=TensorRole.PARAMETER) for tensor in like]
    with swarm(
        2,
        compression=RoleAdaptiveCompression(parameter=Uniform8BitQuantization()),
        state_compression=Float16Compression(),
        tensor_infos=infos,
        declare_state_period=1.0,
    ) as (one, other):
        for averager, value in ((one, 0.1), (other, 0.3)):
            with averager.get_tensors() as tensors:
                tensors[0].fill_(value)
        assert all(result is not None for result in average([one, other]))
        with one.get_tensors() as mine, other.get_tensors() as theirs:
            assert torch.equal(mine[0], theirs[0])
            torch.testing.assert_close(mine[0], torch.full((50, 7), 0.2))
        _, loaded = load(one)
        assert torch.equal(loaded[0], mine[0].half().float())


def test_group_bits() -> None:
    with swarm(1, initial_group_bits="01") as (averager,):
        assert averager.get_group_bits() == "01"
        averager.set_group_bits("110")
        assert averager.get_group_bits(wait=False).result(60) == "110"
        with pytest.raises(ValueError, match="group bits"):
            averager.set_group_bits("2")


def test_life() -> None:
    with swarm(1) as (first,):
        with pytest.raises(ValueError, match="served already"):
            DecentralizedAverager([torch.zeros(1)], first.dht, start=True, prefix="test")
        later = DecentralizedAverager([torch.zeros(1)], first.dht, start=False, prefix="later", auxiliary=True)
        assert not later.is_alive and later.mode is AveragingMode.AUX
        with pytest.raises(RuntimeError, match="not running"):
            later.step()
        later.run_in_background(timeout=60)
        with pytest.raises(RuntimeError, match="started already"):
            later.run_in_background()
        control = later.step(wait=False)
        later.shutdown()
        later.shutdown()
        assert control.cancelled() and not later.is_alive
        with pytest.raises(RuntimeError, match="shut down"):
            later.run_in_background()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_group_size": 1}, "target_group_size"),
        ({"min_group_size": 0}, "min_group_size"),
        ({"initial_group_bits": "012"}, "group bits"),
        ({"min_matchmaking_time": 0.0}, "min_matchmaking_time"),
        ({"request_timeout": -1.0}, "request_timeout"),
        ({"averaging_alpha": 0.0}, "averaging_alpha"),
        ({"part_size_bytes": 0}, "part_size_bytes must be 1 to 8388608, got 0"),
        ({"part_size_bytes": 1 << 30}, "part_size_bytes"),
        ({"allreduce_timeout": 0}, "allreduce_timeout must be a positive number of seconds or None, got 0"),
        ({"reducer_timeout": float("nan")}, "reducer_timeout"),
        ({"bandwidth": -1.0}, "bandwidth"),
        ({"min_vector_size": -1}, "min_vector_size"),
        ({"prefix": ""}, "prefix"),
        ({"declare_state_period": 0}, "declare_state_period"),
        ({"sender_timeout": 0.0}, "sender_timeout"),
        ({"state_compression": Float16Compression}, "state_compression"),
        ({"tensor_infos": ()}, "tensor_infos"),
        ({"compression": PerTensorCompression([])}, "no codec for a tensor with the key 0"),
    ],
)
def test_arguments_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    dht = DHT(start=False)
    with pytest.raises(ValueError, match=words):
        DecentralizedAverager([torch.zeros(1)], dht, **{"start": False, "prefix": "p", **options})
    dht.shutdown()


def test_a_client_cannot_claim_to_be_reachable() -> None:
    dht = DHT(start=False, client_mode=True)
    with pytest.raises(ValueError, match="client_mode=False"):
        DecentralizedAverager([torch.zeros(1)], dht, start=False, prefix="p", client_mode=False)
    dht.shutdown()
