"""Rounds between real processes that get SIGKILL and SIGSTOP in the middle: one outcome for all who are left."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from signal import SIGKILL, SIGSTOP

import psutil
import pytest
import torch

from tests.end_to_end import round_member
from tests.end_to_end.round_member import Role, Strike, Told, tensor_of
from tests.end_to_end.swarm import PATIENCE_SECONDS
from tests.forkserver import CONTEXT

pytestmark = pytest.mark.e2e

TRAINER, SENDER = Role(), Role(bandwidth=0.0, weight=3.0)


class Members:
    """The processes of one round, which begins when all of them are connected."""

    def __init__(self, *roles: Role) -> None:
        self.roles = roles
        self.pipes: list[Connection] = []
        self.processes: list[ForkServerProcess] = []
        for index in range(len(roles)):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=round_member.run, args=(theirs, index, roles))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def begin(self) -> None:
        addresses = [self.hear(index) for index in range(len(self.roles))]
        for message in (addresses, "begin"):
            for pipe in self.pipes:
                pipe.send(message)
            if message is addresses:
                assert [self.hear(index) for index in range(len(self.roles))] == ["connected"] * len(self.roles)

    def hear(self, index: int) -> object:
        """What a member says next; None if it is dead."""
        assert self.pipes[index].poll(PATIENCE_SECONDS), f"member {index} says nothing"
        try:
            return self.pipes[index].recv()
        except (EOFError, ConnectionResetError):
            return None

    def outcome(self, index: int) -> Told:
        told = self.hear(index)
        assert isinstance(told, Told), f"member {index}: {told}"
        return told

    def thaw(self, index: int) -> None:
        process = psutil.Process(self.processes[index].pid)
        assert process.status() == psutil.STATUS_STOPPED
        process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            process.kill()  # also if it is stopped
            process.join()
            pipe.close()


@pytest.fixture
def started() -> Iterator[list[Members]]:
    running: list[Members] = []
    yield running
    for members in running:
        members.end()


def expected_mean(told: Told) -> torch.Tensor:
    """Of the senders that the result names, part by part."""
    pieces, begin = [], 0
    for numel, senders, weights in told.parts:
        window = slice(begin, begin + numel)
        total = sum(
            tensor_of(sender)[window].double() * weight for sender, weight in zip(senders, weights, strict=True)
        )
        pieces.append(total / sum(weights))
        begin += numel
    return torch.cat(pieces)


def check(outcomes: dict[int, Told]) -> None:
    """One outcome: the same bits, which are the mean of those who are named; nobody fails what another one applies."""
    assert len({told.end for told in outcomes.values()} - {"undecided"}) <= 1, outcomes
    applied = {index: told for index, told in outcomes.items() if told.end == "applied"}
    assert len({told.digest for told in applied.values()}) <= 1
    assert len({told.averages for told in applied.values()}) <= 1
    for told in list(applied.values())[:1]:
        got = torch.frombuffer(bytearray(told.averages), dtype=torch.float32).double()
        assert torch.allclose(got, expected_mean(told), rtol=1e-5, atol=1e-6)
    assert all(told.reason for told in outcomes.values() if told.end != "applied")


CASES = {
    "the leader is killed when it has committed": (
        Role(strike=Strike("vote", SIGKILL, 2, before=False)),
        TRAINER,
        TRAINER,
        SENDER,
    ),
    "a member freezes as it is asked what it accepted": (
        Role(strike=Strike("vote", SIGKILL)),
        TRAINER,
        Role(strike=Strike("prepare", SIGSTOP, before=False)),
        TRAINER,
        SENDER,
    ),
}


@pytest.mark.parametrize("roles", CASES.values(), ids=CASES)
def test_one_outcome_of_real_processes(started: list[Members], roles: tuple[Role, ...]) -> None:
    members = Members(*roles)
    started.append(members)
    members.begin()
    victims = {index: role.strike for index, role in enumerate(roles) if role.strike is not None}
    for victim, strike in victims.items():
        assert members.hear(victim) == strike.name
    outcomes = {index: members.outcome(index) for index in range(len(roles)) if index not in victims}
    check(outcomes)
    if len(outcomes) > len(roles) // 2:
        assert not any(told.end == "undecided" for told in outcomes.values()), outcomes
    for victim, strike in victims.items():
        if strike.signal == SIGSTOP:
            members.thaw(victim)
            outcomes[victim] = members.outcome(victim)
        else:
            assert members.hear(victim) is None
    check(outcomes)
    print({index: (told.end, told.reason) for index, told in outcomes.items()})


def test_survivors_that_can_decide_nothing_soon_know_it(started: list[Members]) -> None:
    """Of five strangers four decide. The two dead refuse every connection at once: nobody looks for them for long."""
    role = Role(trust="strangers")
    dead = replace(role, strike=Strike("exchange", SIGKILL, 2))
    members = Members(role, role, role, dead, dead)
    started.append(members)
    members.begin()
    for victim in (3, 4):
        assert members.hear(victim) == "exchange"
    outcomes = {index: members.outcome(index) for index in range(3)}
    check(outcomes)
    assert {told.end for told in outcomes.values()} == {"undecided"}
    assert max(told.seconds for told in outcomes.values()) < 30  # by the round's own clock; 40 to 84 if it looked on
