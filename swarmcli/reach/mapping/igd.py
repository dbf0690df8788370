"""Asking a gateway for a port with UPnP (Internet Gateway Device), through async-upnp-client.

The library reads descriptions and writes SOAP. `PinnedRequester` does the requests: plain HTTP to the gateway's own
address and to no other, whatever its documents say, within bounds of size, number and time. The library refuses
entities and external references in XML (defusedxml).
"""

from __future__ import annotations

import asyncio
import importlib
import random
import re
import socket
from typing import TYPE_CHECKING, Any

import httpx

from swarmcli.reach.mapping.gateway import (
    Gateway,
    GatewayError,
    GatewayRefused,
    Mapping,
    MappingTimes,
    MethodName,
    outer_host,
)

if TYPE_CHECKING:
    from async_upnp_client.client import UpnpService
    from async_upnp_client.const import HttpRequest, HttpResponse

SSDP = ("239.255.255.250", 1900)
MAX_DATAGRAM = 2048
MAX_BODY = 128 << 10  # bytes; the descriptions of real routers have up to 60 KiB
MAX_REQUESTS = 32  # for the descriptions of one device
MAX_LOCATION = 256  # characters
DESCRIPTION = "swarm"

_SEARCHED = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"  # devices of version 2 answer to it, too
_SERVICES = tuple(
    f"urn:schemas-upnp-org:service:{name}" for name in ("WANIPConnection:2", "WANIPConnection:1", "WANPPPConnection:1")
)
_TAKEN = (718, 729)  # codes of the fault that an action ends with (WANIPConnection, section 2.4)

Place = tuple[str, int]


class UPnP:
    """Ports of IPv4."""

    name: MethodName = "UPnP"

    def __init__(self, gateway: Gateway, times: MappingTimes = MappingTimes(), ssdp: Place = SSDP) -> None:
        self._gateway, self._times, self._ssdp = gateway, times, ssdp
        self._requester = PinnedRequester(gateway.host, times.upnp_request)
        self._service: UpnpService | None = None
        self._outer: int | None = None  # the outer port that this peer holds, or has asked for
        self._seconds = times.lease  # 0: for ever, with a gateway that grants nothing else

    async def ask(self, port: int, wanted: int) -> Mapping:
        return await self._within(self._ask(port, wanted))

    async def withdraw(self, port: int) -> None:
        if self._outer is not None:
            question = {"NewRemoteHost": "", "NewExternalPort": self._outer, "NewProtocol": "TCP"}
            await self._within(self._call("DeletePortMapping", question))

    async def _within(self, asking: Any) -> Any:
        """Runs a coroutine in bounded time, and translates what the library raises for a hostile document.

        That may be anything: it expects numbers where numbers belong, and recurses into devices within devices.
        """
        self._requester.renew()
        try:
            async with asyncio.timeout(self._times.upnp_ask):
                return await asking
        except GatewayError:
            raise
        except TimeoutError:
            raise GatewayError("it answers too slowly") from None
        except Exception as error:
            raise GatewayError(f"its answer cannot be read: {type(error).__name__}") from error

    async def _ask(self, port: int, wanted: int) -> Mapping:
        if self._service is None:
            self._service = await self._find_service()
        for outer in (wanted, *(random.randrange(20000, 60000) for _ in range(3))):
            if await self._take(port, outer):
                told = await self._call("GetExternalIPAddress", {})
                return Mapping(outer_host(str(told.get("NewExternalIPAddress"))), outer, self.name, self._gateway.host)
        raise GatewayRefused("the ports are somebody else's")

    async def _take(self, port: int, outer: int) -> bool:
        """Returns whether the outer port leads to ours now. Asks first who holds it: some gateways would take a port
        from another computer."""
        holder = await self._holder(outer)
        own = (self._gateway.local, port)
        if holder not in (None, own):
            return False
        question = {
            "NewRemoteHost": "",
            "NewExternalPort": outer,
            "NewProtocol": "TCP",
            "NewInternalPort": port,
            "NewInternalClient": self._gateway.local,
            "NewEnabled": True,
            "NewPortMappingDescription": DESCRIPTION,
        }
        self._outer = outer
        try:
            await self._add(question)
        except _Fault as fault:
            if fault.code in _TAKEN and holder == own:
                return True  # some gateways do not renew a mapping that stands
            self._outer = None
            if fault.code in _TAKEN:
                return False
            raise
        return True

    async def _add(self, question: dict[str, Any]) -> None:
        try:
            await self._call("AddPortMapping", {**question, "NewLeaseDuration": self._seconds})
        except _Fault as fault:
            if fault.code != 725 or self._seconds == 0:  # OnlyPermanentLeasesSupported
                raise
            self._seconds = 0
            await self._call("AddPortMapping", {**question, "NewLeaseDuration": 0})

    async def _holder(self, outer: int) -> Place | None:
        """The host and port that an outer port leads to; None: to none, as far as the gateway says."""
        question = {"NewRemoteHost": "", "NewExternalPort": outer, "NewProtocol": "TCP"}
        try:
            entry = await self._call("GetSpecificPortMappingEntry", question)
        except _Fault:  # most say 714 (no such entry), some another code
            return None
        return str(entry.get("NewInternalClient")), int(entry.get("NewInternalPort", 0))

    async def _call(self, action: str, question: dict[str, Any]) -> Any:
        from async_upnp_client.exceptions import UpnpActionError

        assert self._service is not None
        try:
            return await self._service.action(action).async_call(**question)
        except UpnpActionError as error:
            raise _Fault(error.error_code, str(error.error_desc or "no reason given")[:80]) from None

    async def _find_service(self) -> UpnpService:
        location = await find_location(self._gateway, self._times.upnp_search, self._ssdp)
        # The library takes 0.2 s to import, and most peers never need it.
        library = await asyncio.to_thread(importlib.import_module, "async_upnp_client.client_factory")
        device = await library.UpnpFactory(self._requester, non_strict=True).async_create_device(location)
        for name in _SERVICES:
            service = device.find_service(name)
            if service is not None:
                return service
        raise GatewayError("it offers no ports")


class _Fault(GatewayRefused):
    def __init__(self, code: int | None, text: str) -> None:
        super().__init__(f"{text} ({code})")
        self.code = code


class PinnedRequester:
    """Carries the library's requests to one host, and to no other."""

    def __init__(self, host: str, seconds: float) -> None:
        """`seconds`: for each request."""
        self._host, self._seconds = host, seconds
        self._left = MAX_REQUESTS

    def renew(self) -> None:
        """Another MAX_REQUESTS are allowed."""
        self._left = MAX_REQUESTS

    async def async_http_request(self, http_request: HttpRequest) -> HttpResponse:
        """Raises GatewayError."""
        url = httpx.URL(http_request.url)
        if url.scheme != "http" or url.host != self._host:
            raise GatewayError("it names another computer as itself")
        self._left -= 1
        if self._left < 0:
            raise GatewayError("its description never ends")
        try:
            async with asyncio.timeout(self._seconds):
                return await self._request(http_request)
        except TimeoutError:
            raise GatewayError("it answers too slowly") from None
        except httpx.HTTPError as error:
            raise GatewayError(f"it cannot be asked: {error or type(error).__name__}"[:120]) from None

    async def _request(self, request: HttpRequest) -> HttpResponse:
        from async_upnp_client.const import HttpResponse

        # No proxy of the environment, no redirects, no certificates: this goes to the local router, in the clear.
        transport = httpx.AsyncHTTPTransport(verify=False, trust_env=False)
        headers = {**request.headers, "Accept-Encoding": "identity", "Connection": "close"}
        body = None if request.body is None else request.body.encode()
        async with (
            httpx.AsyncClient(transport=transport, trust_env=False, timeout=self._seconds) as client,
            client.stream(request.method, request.url, headers=headers, content=body) as response,
        ):
            received = bytearray()
            async for piece in response.aiter_raw():  # undecoded: compressed bytes could unpack to any size
                received += piece
                if len(received) > MAX_BODY:
                    raise GatewayError("its answer is too large")
            return HttpResponse(response.status_code, dict(response.headers), received.decode("utf-8", "replace"))


async def find_location(gateway: Gateway, seconds: float, ssdp: Place = SSDP) -> str:
    """The URL of the gateway's description. The search goes to everyone in the LAN, but only the gateway's answer
    counts. Raises GatewayError."""
    loop = asyncio.get_running_loop()
    listening = _Locations(gateway.host, loop.create_future())
    try:
        transport, _ = await loop.create_datagram_endpoint(lambda: listening, local_addr=(gateway.local, 0))
    except OSError as error:
        raise GatewayError(f"it cannot be asked: {error.strerror or error}") from None
    try:
        place = transport.get_extra_info("socket")
        if place is not None:
            # The system's own route for multicast may lead elsewhere.
            place.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(gateway.local))
        for target in dict.fromkeys((ssdp, (gateway.host, ssdp[1]))):
            transport.sendto(_search(target), target)
        async with asyncio.timeout(seconds):
            return await listening.found
    except TimeoutError:
        raise GatewayError("it does not answer") from None
    finally:
        transport.close()


def _search(target: Place) -> bytes:
    lines = (
        "M-SEARCH * HTTP/1.1",
        f"HOST: {target[0]}:{target[1]}",
        'MAN: "ssdp:discover"',
        "MX: 1",
        f"ST: {_SEARCHED}",
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


def location_in(answer: bytes, host: str) -> str | None:
    """The URL in an answer to a search, if it is on `host`."""
    if len(answer) > MAX_DATAGRAM or not answer.startswith(b"HTTP/1.1 200"):
        return None
    found = re.search(rb"^location:[ \t]*(http://[!-~]+)[ \t]*\r?$", answer, re.IGNORECASE | re.MULTILINE)
    if found is None or len(found[1]) > MAX_LOCATION:
        return None
    location = found[1].decode("ascii")
    try:
        return location if httpx.URL(location).host == host else None
    except httpx.InvalidURL:
        return None


class _Locations(asyncio.DatagramProtocol):
    def __init__(self, host: str, found: asyncio.Future[str]) -> None:
        self._host = host
        self.found = found

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        location = location_in(data, self._host) if addr[0] == self._host else None
        if location is not None and not self.found.done():
            self.found.set_result(location)
