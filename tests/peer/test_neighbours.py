from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest

from coordinator_web.control import as_json
from swarmcli.errors import ControlError
from swarmcli.machine import client
from swarmcli.machine.registry import LocalPeer, LocalPeers
from swarmcli.peer.neighbours import Neighbours, described
from tests.web.fake_source import PAUSED, TRAINERS, FakeRun

HERE = LocalPeer(os.getpid(), time.time(), "trainer", "r", "/home/ada/r/trainer-1", "ada", "http://127.0.0.1:1")


def test_a_peer_is_shown_as_it_says_that_it_goes() -> None:
    people = [dataclasses.replace(TRAINERS[0], me=True), TRAINERS[1]]
    state = json.loads(as_json(FakeRun(finished_epochs=3, people=people).overview()).body)
    shown = described(HERE, state, "http://127.0.0.1:1/?token=x")
    assert (shown.me, shown.answers, shown.state, shown.epoch, shown.max_epochs) == (True, True, "training", 3, 200)
    assert shown.samples_per_second == pytest.approx(212.0) and shown.sentence.startswith("Training at 212")
    paused = json.loads(as_json(FakeRun(activity=PAUSED).overview()).body)
    assert described(HERE, paused, "").state == "paused"


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
    assert (shown.answers, shown.url, shown.state, shown.epoch, shown.run_id) == (False, "", "", None, "r")
    neighbours.look()
    assert len(asked) == 1  # however many pages ask
    now[0] = 2.0
    neighbours.look()
    assert len(asked) == 2
