"""One member of a round in a process of its own, over TCP, that stops or kills itself at a step of the protocol.

The processes are forked from one that has imported everything; what they tell goes through a pipe, in this order: its
addresses, the step at which it strikes itself (if it comes to that), and its outcome.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from swarmcli.averaging.config import AllreduceOptions, Trust
from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.round.allreduce import Allreduce, AllreduceResult
from swarmcli.averaging.round.service import AllreduceService
from swarmcli.averaging.shares import reducing_shares
from swarmcli.errors import RoundFailed, RoundUndecided
from swarmcli.network import Endpoint, Identity, PeerID
from swarmcli.network.limits import NetworkLimits
from swarmcli.network.transports.tcp.transport import TCPTransport

NUMEL, PART_BYTES = 100_000, 32 << 10
LIMITS = NetworkLimits(keepalive_interval=0.5, keepalive_timeout=6.0)  # a frozen process is noticed sooner


@dataclass(frozen=True)
class Strike:
    """The member gets a signal from itself at a call or stream of this name that arrives, the how manieth it is."""

    name: str
    signal: signal.Signals
    count: int = 1
    before: bool = True  # or after it has acted on it, when the answer is not sent yet


@dataclass(frozen=True)
class Role:
    bandwidth: float = 1.0
    weight: float = 1.0
    strike: Strike | None = None
    trust: Trust | None = None  # None: whatever those who are left can decide with


@dataclass(frozen=True)
class Told:
    """How the round ended for a member."""

    end: str  # "applied", "failed" or "undecided"
    reason: str = ""
    digest: str = ""
    averages: bytes = b""  # float32
    parts: tuple[tuple[int, tuple[int, ...], tuple[float, ...]], ...] = ()  # elements, senders, weights of each
    seconds: float = 0.0  # from the beginning of the round


def tensor_of(index: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(index))


def run(pipe: Connection, index: int, roles: Sequence[Role]) -> None:
    """What the process does."""
    torch.set_num_threads(1)
    asyncio.run(_run(pipe, index, roles))


async def _run(pipe: Connection, index: int, roles: Sequence[Role]) -> None:
    endpoint = Endpoint(TCPTransport(Identity.from_seed(index), host="127.0.0.1", limits=LIMITS))
    await endpoint.start()
    if roles[index].strike is not None:
        _strike_at(endpoint, pipe, roles[index].strike)
    service = AllreduceService(endpoint, "test")
    service.start()
    pipe.send(endpoint.addresses)
    group = _group(await asyncio.to_thread(pipe.recv), roles)
    if index > 0:
        await endpoint.connect(group.members[0].addresses[0], timeout=30)
    pipe.send("connected")
    await asyncio.to_thread(pipe.recv)  # everyone is
    pipe.send(await _take_part(service, group, index, roles))
    await asyncio.to_thread(pipe.recv)  # goes on answering the others until it is killed


def _group(addresses: Sequence[tuple[str, ...]], roles: Sequence[Role]) -> Group:
    members = [
        Member(Identity.from_seed(index).peer_id, True, False, role.bandwidth, addresses[index])
        for index, role in enumerate(roles)
    ]
    return Group.form(b"", members, reducing_shares(members, NUMEL), bytes(16))


async def _take_part(service: AllreduceService, group: Group, index: int, roles: Sequence[Role]) -> Told:
    # Strangers decide with n - f of them: where more are struck, only members that trust each other come to a decision.
    struck = sum(role.strike is not None for role in roles)
    trust: Trust = roles[index].trust or ("members" if struck > (len(roles) - 1) // 3 else "strangers")
    options, weight = AllreduceOptions(part_size_bytes=PART_BYTES, trust=trust), roles[index].weight
    began = asyncio.get_running_loop().time()
    told = await _round(service, group, index, weight, options)
    seconds = asyncio.get_running_loop().time() - began
    return replace(told, seconds=seconds)


async def _round(service: AllreduceService, group: Group, index: int, weight: float, options: AllreduceOptions) -> Told:
    with service.expecting(group):
        round_ = Allreduce(service, group, [tensor_of(index)], weight=weight, options=options)
        try:
            return _told(await round_.run())
        except RoundFailed as error:
            return Told("failed", str(error))
        except RoundUndecided as error:
            return Told("undecided", str(error))


def _told(result: AllreduceResult) -> Told:
    averages = b"".join(tensor.numpy().tobytes() for tensor in result.averages)
    parts = tuple((each.part.descriptor.numel, each.senders, each.weights) for each in result.parts)
    return Told("applied", "", result.digest.hex(), averages, parts)


def _strike_at(endpoint: Endpoint, pipe: Connection, strike: Strike) -> None:
    seen = 0

    def step(method: str, before: bool) -> None:
        nonlocal seen
        if method.split(".")[1] == strike.name and before == strike.before:
            seen += 1
            if seen == strike.count:
                pipe.send(strike.name)
                os.kill(os.getpid(), strike.signal)

    def watched(serve: Callable[..., None]) -> Callable[..., None]:
        def register(method: str, request: type[Any], handler: Callable[..., Awaitable[Any]]) -> None:
            async def handle(peer: PeerID, *message: Any) -> Any:
                step(method, True)
                answer = await handler(peer, *message)
                step(method, False)
                return answer

            serve(method, request, handle)

        return register

    endpoint.serve = watched(endpoint.serve)  # type: ignore[method-assign]
    endpoint.serve_stream = watched(endpoint.serve_stream)  # type: ignore[method-assign]
