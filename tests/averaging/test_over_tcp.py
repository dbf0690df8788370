"""The same rounds and downloads over the real transport: encrypted, with executors and real time."""

from __future__ import annotations

import asyncio

import torch

from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.round.allreduce import Allreduce
from swarmcli.averaging.round.service import AllreduceService
from swarmcli.averaging.shares import reducing_shares
from swarmcli.network import Endpoint, Identity
from swarmcli.network.transports.tcp.transport import TCPTransport
from tests.simulation import in_real_time


def make_endpoint(*, listening: bool = True) -> Endpoint:
    return Endpoint(TCPTransport(Identity.generate(), host="127.0.0.1"), client_mode=not listening)


@in_real_time
async def test_two_trainers_and_an_auxiliary_behind_a_firewall() -> None:
    endpoints = [make_endpoint(), make_endpoint(), make_endpoint(listening=False)]
    services = [AllreduceService(endpoint, "test") for endpoint in endpoints]
    for endpoint, service in zip(endpoints, services, strict=True):
        await endpoint.start()
        service.start()
    members = [
        Member(endpoint.peer_id, not endpoint.client_mode, index == 2, 1.0, endpoint.addresses)
        for index, endpoint in enumerate(endpoints)
    ]
    for endpoint in endpoints[1:]:
        await endpoint.connect(members[0].addresses[0], timeout=60)
    tensors = [[torch.full((700_000,), float(index)), torch.ones(3, 3)] for index in range(3)]  # 2.7 MiB, 6 parts
    group = Group.form(b"", members, reducing_shares(members, 700_009), bytes(16))
    results = await asyncio.gather(
        *(
            Allreduce(service, group, mine, weight=index + 1.0).run()
            for index, (service, mine) in enumerate(zip(services, tensors, strict=True))
        )
    )
    for result in results[:2]:
        assert torch.allclose(result.averages[0], torch.full((700_000,), 2 / 3))
        assert torch.equal(result.averages[1], torch.ones(3, 3))
        assert result.digest == results[2].digest and result.left_out == {}
    assert results[2].averages == () and results[2].bytes_received > 1_000_000
    for endpoint, service in zip(endpoints, services, strict=True):
        service.close()
        await endpoint.close()
