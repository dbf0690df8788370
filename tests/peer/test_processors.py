from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from swarmcli.machine.registry import VARIABLE, LocalPeer, LocalPeers, RegistryEntry, birth_of
from swarmcli.machine.sensors import OthersUse
from swarmcli.optim.config import Role
from swarmcli.peer.processors import ProcessorShare, sharing_processors
from swarmcli.threads import on_all_threads
from tests.test_threads import in_a_thread
from tests.training.small_tasks import small


@pytest.fixture(autouse=True)
def busy(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The share of all processors that other programs take, its last element."""
    told = [0.0]
    monkeypatch.setattr(OthersUse, "read", lambda self, own: told[-1])
    return told


class Registry(LocalPeers):
    """One in which the test says who lives."""

    def __init__(self) -> None:
        self.peers: set[LocalPeer] = set()

    def has(self, peer: LocalPeer, *, token: bool) -> bool:
        return peer in self.peers

    def write(self, peer: LocalPeer, token: str) -> None:
        self.peers.add(peer)

    def living(self) -> list[LocalPeer]:
        return sorted(self.peers, key=lambda peer: peer.started)


def peer(number: int, role: Role = "trainer") -> LocalPeer:
    return LocalPeer(number, float(number), role, "run", f"/home-{number}")


def counts(threads: int, *peers: LocalPeer) -> list[int]:
    """The threads of each of these peers of one machine, on which torch alone would take so many."""
    registry = Registry()
    shares = [ProcessorShare(registry, RegistryEntry(registry, each), threads, every=0.0) for each in peers]
    for share in shares:
        share.count()
    return [share.count() for share in shares]


def test_trainers_divide_what_torch_would_take_alone_and_those_who_compute_now_and_then_take_nothing() -> None:
    assert counts(8, peer(1)) == [8]
    assert counts(2, peer(1), peer(2)) == [1, 1]
    assert counts(8, *map(peer, range(3))) == [3, 3, 2]
    assert counts(2, *map(peer, range(3))) == [1, 1, 1]

    others = peer(1, "monitor"), peer(2, "auxiliary")
    assert counts(8, *others, peer(3)) == [4, 4, 8]
    assert counts(8, *others) == [8, 8]


def test_a_core_that_other_programs_keep_busy_is_left_to_them(
    busy: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for share, threads in ((0.05, [8]), (0.1, [7]), (0.5, [4]), (1.0, [1])):
        busy.append(share)
        assert counts(8, peer(1)) == threads
    busy.append(0.5)
    assert counts(8, peer(1), peer(2)) == [2, 2]


def test_the_share_follows_who_comes_and_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    share = ProcessorShare(registry, RegistryEntry(registry, peer(1)), 4, every=3600.0)
    assert share.count() == 4
    registry.write(peer(2), "")
    assert share.count() == 4  # it does not look at every step
    monkeypatch.setattr(share, "_every", 0.0)
    assert share.count() == 2
    registry.peers.remove(peer(2))
    assert share.count() == 4
    (tmp_path / "file").touch()
    unseen = LocalPeers(tmp_path / "file" / "registry")
    assert ProcessorShare(unseen, RegistryEntry(unseen, peer(1)), 4).count() == 4, "where nobody can be seen"


def test_the_thread_that_computes_and_the_teams_of_others_follow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "registry"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    beside = LocalPeer(os.getppid(), 1e9, "trainer", "run", "/home", born=birth_of(os.getppid()))
    try:
        torch.set_num_threads(4)
        with sharing_processors(small(tmp_path), "trainer", tmp_path, every=0.0) as share:
            share.take()
            assert torch.get_num_threads() == 4
            with LocalPeers().entered(beside):
                share.take()
                assert torch.get_num_threads() == in_a_thread(lambda: on_all_threads(torch.get_num_threads)) == 2
        with (
            sharing_processors(small(tmp_path, "local.threads=3"), "trainer", tmp_path, every=0.0) as share,
            LocalPeers().entered(beside),
        ):
            assert share.count() == 3  # a person's own choice
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        torch.set_num_threads(4)
        with sharing_processors(small(tmp_path), "trainer", tmp_path, every=0.0) as share, LocalPeers().entered(beside):
            assert share.count() == 4  # likewise
    finally:
        torch.set_num_threads(before)
    assert LocalPeers().living() == []
