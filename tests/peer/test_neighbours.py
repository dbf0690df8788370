from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from coordinator_web.control import as_json
from swarmcli.errors import ControlError
from swarmcli.machine import client
from swarmcli.machine.registry import LocalPeer, LocalPeers
from swarmcli.peer.neighbours import Neighbours
from tests.web.fake_source import PAUSED, FakeRun

HERE = LocalPeer(os.getpid(), time.time(), "trainer", "r", "/home/ada/r/trainer-1", "ada", "http://127.0.0.1:1")


def test_a_peer_is_shown_as_it_says_that_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.loads(as_json(FakeRun(activity=PAUSED).overview()).body)
    registry = LocalPeers(tmp_path)
    monkeypatch.setattr(registry, "peers", lambda: [HERE])
    monkeypatch.setattr(registry, "token", lambda peer: "x")
    monkeypatch.setattr(client, "get", lambda *_, **__: said)
    (shown,) = Neighbours(registry).look()
    assert (shown.me, shown.sentence, shown.url) == (True, "Paused: on battery", "http://127.0.0.1:1/?token=x")


def test_one_that_does_not_answer_is_shown_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[LocalPeer] = []

    def silent(peer: LocalPeer, *_: object, **__: object) -> None:
        asked.append(peer)
        raise ControlError("busy")

    monkeypatch.setattr(client, "get", silent)
    registry = LocalPeers(tmp_path)
    monkeypatch.setattr(registry, "peers", lambda: [HERE])
    now = [0.0]
    neighbours = Neighbours(registry, clock=lambda: now[0])
    (shown,) = neighbours.look()
    assert (shown.sentence, shown.url, shown.run_id) == ("", "", "r")
    neighbours.look()
    assert len(asked) == 1  # however many pages ask
    now[0] = 2.0
    neighbours.look()
    assert len(asked) == 2
