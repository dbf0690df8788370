"""Asking a gateway for a port with PCP, or with its forerunner NAT-PMP: a question, and an answer, over UDP."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TypeVar

from swarmcli.reach.mapping import packets
from swarmcli.reach.mapping.gateway import LEASE, Gateway, GatewayError, Mapping, MethodName, outer_host

WAITS = (0.25, 0.5, 1.0)  # seconds for an answer, each after the question was sent once more (RFC 6886, section 3.1)
MAX_WAITING_ANSWERS = 8  # datagrams that are not read yet; further ones are dropped

T = TypeVar("T")


class PCP:
    """Ports of IPv4, and holes in the firewall for IPv6."""

    name: MethodName = "PCP"

    def __init__(self, gateway: Gateway, server_port: int = packets.SERVER_PORT) -> None:
        self._gateway = gateway
        self._server_port = server_port
        # Whoever shows the nonce of a mapping may change it: it stays the same as long as we ask this gateway.
        self._nonce = os.urandom(packets.NONCE_BYTES)

    async def ask(self, port: int, wanted: int) -> Mapping:
        granted = await self._map(port, wanted, LEASE)
        if granted.seconds == 0:
            raise GatewayError("it granted the port for no time")
        return Mapping(outer_host(granted.host), granted.port, self.name, self._gateway.host)

    async def withdraw(self, port: int) -> None:
        await self._map(port, 0, 0)

    async def _map(self, port: int, wanted: int, seconds: int) -> packets.Granted:
        question = packets.pcp_map_question(self._gateway.local, port, wanted, seconds, self._nonce)
        return await exchange(
            self._gateway, self._server_port, question, lambda answer: packets.pcp_granted(answer, port, self._nonce)
        )


class NatPMP:
    """Ports of IPv4."""

    name: MethodName = "NAT-PMP"

    def __init__(self, gateway: Gateway, server_port: int = packets.SERVER_PORT) -> None:
        self._gateway = gateway
        self._server_port = server_port

    async def ask(self, port: int, wanted: int) -> Mapping:
        host = await self._exchange(packets.pmp_address_question(), packets.pmp_address)
        granted = await self._exchange(
            packets.pmp_map_question(port, wanted, LEASE), lambda answer: packets.pmp_granted(answer, port)
        )
        if granted.seconds == 0:
            raise GatewayError("it granted the port for no time")
        return Mapping(outer_host(host), granted.port, self.name, self._gateway.host)

    async def withdraw(self, port: int) -> None:
        await self._exchange(packets.pmp_map_question(port, 0, 0), lambda answer: packets.pmp_granted(answer, port))

    async def _exchange(self, question: bytes, read: Callable[[bytes], T | None]) -> T:
        return await exchange(self._gateway, self._server_port, question, read)


async def exchange(gateway: Gateway, port: int, question: bytes, read: Callable[[bytes], T | None]) -> T:
    """What `read` makes of the first datagram that it takes for an answer. Raises GatewayError if none comes, too."""
    loop = asyncio.get_running_loop()
    try:
        # Connected: the system drops what comes from anybody but the gateway's port.
        transport, answers = await loop.create_datagram_endpoint(
            _Answers, local_addr=(gateway.local, 0), remote_addr=(gateway.host, port)
        )
    except OSError as error:
        raise GatewayError(f"it cannot be asked: {error.strerror or error}") from None
    try:
        for seconds in WAITS:
            transport.sendto(question)
            try:
                async with asyncio.timeout(seconds):
                    return await answers.first(read)
            except TimeoutError:
                continue
        raise GatewayError("it does not answer")
    finally:
        transport.close()


class _Answers(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self._waiting: asyncio.Queue[bytes | OSError] = asyncio.Queue(MAX_WAITING_ANSWERS)

    def datagram_received(self, data: bytes, addr: object) -> None:
        self._put(data)

    def error_received(self, exc: Exception) -> None:
        self._put(exc if isinstance(exc, OSError) else OSError(str(exc)))

    async def first(self, read: Callable[[bytes], T | None]) -> T:
        while True:
            came = await self._waiting.get()
            if isinstance(came, OSError):  # nobody listens there, says the gateway
                raise GatewayError(came.strerror or str(came))
            answer = read(came)
            if answer is not None:
                return answer

    def _put(self, came: bytes | OSError) -> None:
        if not self._waiting.full():
            self._waiting.put_nowait(came)
