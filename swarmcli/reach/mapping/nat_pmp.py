"""Asking a gateway for a port with NAT-PMP (RFC 6886): a request of fixed layout, and an answer, over UDP.

Every reader returns None for a datagram that is no answer to this request, and raises GatewayRefused for an answer that
says no.
"""

from __future__ import annotations

import asyncio
import ipaddress
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from swarmcli.reach.mapping.gateway import (
    Gateway,
    GatewayError,
    GatewayRefused,
    Mapping,
    MappingTimes,
    MethodName,
    outer_host,
)

_VERSION = 0
_ADDRESS, _MAP_TCP = 0, 2  # operations
_RESPONSE = 0x80
_QUESTION = struct.Struct("!BBHHHI")  # version, operation, reserved, inner port, outer port, seconds
_HEADER = struct.Struct("!BBHI")  # version, operation, result, seconds since the gateway's start
_MAPPED = struct.Struct("!HHI")  # inner port, outer port, seconds
_RESULTS = {
    1: "it does not speak this version",
    2: "port mapping is switched off",
    3: "it has no connection to the internet",
    4: "it has no port left",
    5: "it does not know the question",
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Granted:
    port: int
    seconds: int


class NatPMP:
    """Ports of IPv4."""

    name: MethodName = "NAT-PMP"

    def __init__(self, gateway: Gateway, times: MappingTimes = MappingTimes(), server_port: int = 5351) -> None:
        self._gateway, self._times, self._server_port = gateway, times, server_port

    async def ask(self, port: int, wanted: int) -> Mapping:
        host = await self._exchange(bytes([_VERSION, _ADDRESS]), read_address)
        granted = await self._map(port, wanted, self._times.lease)
        if granted.seconds == 0:
            raise GatewayError("it granted the port for no time")
        return Mapping(outer_host(host), granted.port, self.name, self._gateway.host)

    async def withdraw(self, port: int) -> None:
        await self._map(port, 0, 0)  # a lifetime of 0 deletes the mapping (RFC 6886, section 3.4)

    async def _map(self, port: int, wanted: int, seconds: int) -> Granted:
        question = _QUESTION.pack(_VERSION, _MAP_TCP, 0, port, wanted, seconds)
        return await self._exchange(question, lambda answer: read_granted(answer, port))

    async def _exchange(self, question: bytes, read: Callable[[bytes], T | None]) -> T:
        """Sends a question, and reads the first datagram that `read` takes for an answer. Raises GatewayError."""
        loop, gateway = asyncio.get_running_loop(), self._gateway
        try:
            # Connected: the system drops what comes from anybody but the gateway's port.
            transport, answers = await loop.create_datagram_endpoint(
                _Answers, local_addr=(gateway.local, 0), remote_addr=(gateway.host, self._server_port)
            )
        except OSError as error:
            raise GatewayError(f"it cannot be asked: {error.strerror or error}") from None
        try:
            for seconds in self._times.nat_pmp_waits:
                transport.sendto(question)
                try:
                    async with asyncio.timeout(seconds):
                        return await answers.first(read)
                except TimeoutError:
                    continue
            raise GatewayError("it does not answer")
        finally:
            transport.close()


def read_address(answer: bytes) -> str | None:
    """The outer address in an answer."""
    if not _answers(answer, _ADDRESS) or len(answer) != _HEADER.size + 4:
        return None
    return str(ipaddress.IPv4Address(answer[_HEADER.size :]))


def read_granted(answer: bytes, port: int) -> Granted | None:
    """The grant for this port in an answer."""
    if not _answers(answer, _MAP_TCP) or len(answer) != _HEADER.size + _MAPPED.size:
        return None
    inner, outer, seconds = _MAPPED.unpack_from(answer, _HEADER.size)
    if inner != port:
        return None
    if outer == 0 and seconds:
        raise GatewayError("it granted port 0")
    return Granted(outer, seconds)


def _answers(answer: bytes, operation: int) -> bool:
    if not _HEADER.size <= len(answer) <= 1100:
        return False
    # The ignored field is the gateway's epoch, which shows that it has forgotten all mappings: a peer that asks every
    # two minutes does not need it.
    version, answered, result, _ = _HEADER.unpack_from(answer)
    # A gateway that knows other versions only answers with one of these and result 1.
    if answered != _RESPONSE | operation or (version != _VERSION and result != 1):
        return False
    if result:
        raise GatewayRefused(_RESULTS.get(result, f"result {result}"))
    return True


class _Answers(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self._waiting: asyncio.Queue[bytes | OSError] = asyncio.Queue(8)  # further ones are dropped

    def datagram_received(self, data: bytes, addr: object) -> None:
        self._put(data)

    def error_received(self, exc: Exception) -> None:
        self._put(exc if isinstance(exc, OSError) else OSError(str(exc)))

    async def first(self, read: Callable[[bytes], T | None]) -> T:
        while True:
            came = await self._waiting.get()
            if isinstance(came, OSError):  # nothing listens there: ICMP from the gateway
                raise GatewayError(came.strerror or str(came))
            answer = read(came)
            if answer is not None:
                return answer

    def _put(self, came: bytes | OSError) -> None:
        if not self._waiting.full():
            self._waiting.put_nowait(came)
