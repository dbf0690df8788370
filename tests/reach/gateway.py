"""A home router that maps ports, for tests: NAT-PMP and UPnP, honest or not. It needs nothing but Python.

In a test it listens on loopback, and its table of ports is a dictionary. `python -m tests.reach.gateway` runs it on the
router of a network namespace, at the ports where routers listen, and what it grants are rules of nftables.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import re
import socket
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, cast

SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DEVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"


@dataclass
class Behaviour:
    """What the gateway does; a test may change it while it runs."""

    speaks: tuple[str, ...] = ("NAT-PMP", "UPnP")  # others get no answer
    outer: str = "5.2.0.1"  # the address that it claims
    refuses: bool = False
    silent: bool = False
    permanent_only: bool = False
    gives_away: bool = False  # with UPnP: a port that another computer holds
    seconds: int | None = None  # that it grants; None: what it is asked for
    description: bytes | None = None  # None: its own
    action_answer: bytes | None = None  # what every action gets
    http_head: str = ""  # further lines of every answer
    drip: bool = False  # answers over HTTP never come to their end


@dataclass
class HomeGateway:
    """`ports`: outer port → the computer and port inside. `changed` is called after every change."""

    host: str = "127.0.0.1"
    behaviour: Behaviour = field(default_factory=Behaviour)
    ports: dict[int, tuple[str, int]] = field(default_factory=dict)
    changed: Callable[[HomeGateway], None] = lambda gateway: None
    nat_pmp_port: int = 0
    ssdp_port: int = 0
    http_port: int = 0
    asked: list[str] = field(default_factory=list)  # what was asked for, in order

    async def __aenter__(self) -> HomeGateway:
        loop = asyncio.get_running_loop()
        self._nat_pmp, _ = await loop.create_datagram_endpoint(
            lambda: Answering(self._answer_pmp), local_addr=(self.host, self.nat_pmp_port)
        )
        self._ssdp, _ = await loop.create_datagram_endpoint(
            lambda: Answering(self._answer_search), sock=search_socket(self.host, self.ssdp_port)
        )
        self._http = await asyncio.start_server(self._serve, self.host, self.http_port)
        self.nat_pmp_port = self._nat_pmp.get_extra_info("sockname")[1]
        self.ssdp_port = self._ssdp.get_extra_info("sockname")[1]
        self.http_port = self._http.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._nat_pmp.close()
        self._ssdp.close()
        self._http.close()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.http_port}/"

    def forget(self) -> None:
        """As a restart does."""
        self.ports.clear()
        self.changed(self)

    # Ports

    def _give(self, client: str, inner: int, wanted: int) -> int:
        """The port that the asker has already; otherwise the one that it wants, or the next that is free."""
        for outer, holder in self.ports.items():
            if holder == (client, inner):
                return outer
        outer = wanted or inner
        while outer in self.ports:
            outer += 1
        self.ports[outer] = (client, inner)
        self.changed(self)
        return outer

    def _take_back(self, client: str, inner: int) -> None:
        for outer in [outer for outer, holder in self.ports.items() if holder == (client, inner)]:
            del self.ports[outer]
        self.changed(self)

    # NAT-PMP

    def _answer_pmp(self, question: bytes, client: str) -> bytes | None:
        if self.behaviour.silent or "NAT-PMP" not in self.behaviour.speaks:
            return None
        if question[0] != 0:
            return struct.pack("!BBHI", 0, 0x80 | question[1], 1, 7)
        result = 2 if self.behaviour.refuses else 0
        if question[1] == 0:
            outer = ipaddress.IPv4Address(self.behaviour.outer).packed
            return struct.pack("!BBHI4s", 0, 0x80, result, 7, outer)
        inner, wanted, seconds = struct.unpack_from("!HHI", question, 4)
        self.asked.append(f"NAT-PMP {seconds}")
        port = 0
        if not result and seconds:
            port = self._give(client, inner, wanted)
        elif not result:
            self._take_back(client, inner)
        granted = min(seconds, self.behaviour.seconds or seconds)
        return struct.pack("!BBHIHHI", 0, 0x80 | question[1], result, 7, inner, port, granted)

    # UPnP

    def _answer_search(self, question: bytes, client: str) -> bytes | None:
        if self.behaviour.silent or "UPnP" not in self.behaviour.speaks or not question.startswith(b"M-SEARCH"):
            return None
        location = f"{self.url}igd.xml"
        return f"HTTP/1.1 200 OK\r\nST: {DEVICE}\r\nLocation: {location}\r\nUSN: uuid:1::{DEVICE}\r\n\r\n".encode()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"(?i)content-length: *(\d+)", head)
            body = (await reader.readexactly(int(length[1]))).decode() if length else ""
            status, document = self._document(head, body, writer.get_extra_info("peername")[0])
            writer.write(f"HTTP/1.1 {status}\r\n{self.behaviour.http_head}Connection: close\r\n".encode())
            if self.behaviour.drip:
                while True:
                    writer.write(b"X: x\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.01)
            writer.write(f"Content-Length: {len(document)}\r\n\r\n".encode() + document)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _document(self, head: str, body: str, client: str) -> tuple[str, bytes]:
        path = head.split()[1]
        if path == "/igd.xml":
            return "200 OK", self.behaviour.description or description().encode()
        if path == "/scpd.xml":
            return "200 OK", SCPD.encode()
        action = re.search(r'(?i)soapaction: *"[^"]*#(\w+)"', head)
        assert action is not None
        if self.behaviour.action_answer is not None:
            return "200 OK", self.behaviour.action_answer
        arguments = dict(re.findall(r"<(New\w+)>([^<]*)</", body))
        self.asked.append(action[1])
        told = self._act(action[1], arguments, client)
        if isinstance(told, int):
            return "500 Internal Server Error", fault(told).encode()
        return "200 OK", soap(f"{action[1]}Response", told).encode()

    def _act(self, action: str, question: dict[str, str], client: str) -> dict[str, Any] | int:
        """What an action tells, or the code of its fault."""
        outer = int(question.get("NewExternalPort", 0))
        if action == "GetExternalIPAddress":
            return {"NewExternalIPAddress": self.behaviour.outer}
        if self.behaviour.refuses:
            return 606
        holder = self.ports.get(outer)
        if action == "AddPortMapping":
            own = (question["NewInternalClient"], int(question["NewInternalPort"]))
            if holder not in (None, own) and not self.behaviour.gives_away:
                return 718
            if self.behaviour.permanent_only and question["NewLeaseDuration"] != "0":
                return 725
            self.asked.append(f"UPnP {question['NewLeaseDuration']}")
            self.ports[outer] = own
        elif holder is None:
            return 714
        elif action == "DeletePortMapping":
            del self.ports[outer]
        else:
            return {"NewInternalPort": holder[1], "NewInternalClient": holder[0], "NewEnabled": 1} | {
                "NewPortMappingDescription": "a port",
                "NewLeaseDuration": 60,
            }
        self.changed(self)
        return {}


class Answering(asyncio.DatagramProtocol):
    def __init__(self, answer: Callable[[bytes, str], bytes | None]) -> None:
        self._answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        answer = self._answer(data, addr[0])
        if answer is not None:
            self._transport.sendto(answer, addr)


def search_socket(host: str, port: int) -> socket.socket:
    place = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    place.setblocking(False)
    if port == 0:
        place.bind((host, 0))
    else:
        group = socket.inet_aton("239.255.255.250") + socket.inet_aton(host)
        place.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        place.bind(("", port))
    return place


def description(control: str = "/control", devices: str = "", services: int = 1) -> str:
    """The description of a device within a device within a device, as the standard has it."""
    service = f"""<service><serviceType>{SERVICE}</serviceType><serviceId>urn:upnp-org:serviceId:1</serviceId>
      <SCPDURL>/scpd.xml</SCPDURL><controlURL>{control}</controlURL><eventSubURL>/events</eventSubURL></service>"""
    inner = _device("WANConnectionDevice", f"<serviceList>{service * services}</serviceList>")
    middle = _device("WANDevice", f"<deviceList>{inner}</deviceList>")
    outer = _device("InternetGatewayDevice", f"<deviceList>{middle}{devices}</deviceList>")
    return f'<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0">{outer}</root>'


def _device(kind: str, inside: str) -> str:
    return f"<device><deviceType>urn:schemas-upnp-org:device:{kind}:1</deviceType>{inside}</device>"


def soap(name: str, values: dict[str, Any]) -> str:
    inside = "".join(f"<{key}>{value}</{key}>" for key, value in values.items())
    return f"""<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>
      <u:{name} xmlns:u="{SERVICE}">{inside}</u:{name}></s:Body></s:Envelope>"""


def fault(code: int) -> str:
    return f"""<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body><s:Fault>
      <faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>
      <UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>{code}</errorCode><errorDescription>no
      </errorDescription></UPnPError></detail></s:Fault></s:Body></s:Envelope>"""


def _scpd() -> str:
    types = {"string": ("RemoteHost", "Protocol", "InternalClient", "Description", "Address"), "boolean": ("Enabled",)}
    types |= {"ui2": ("Port",), "ui4": ("Lease",)}
    variables = "".join(
        f'<stateVariable sendEvents="no"><name>{name}</name><dataType>{kind}</dataType></stateVariable>'
        for kind, names in types.items()
        for name in names
    )
    entry = {"NewInternalPort": "Port", "NewInternalClient": "InternalClient", "NewEnabled": "Enabled"} | {
        "NewPortMappingDescription": "Description",
        "NewLeaseDuration": "Lease",
    }
    which = {"NewRemoteHost": "RemoteHost", "NewExternalPort": "Port", "NewProtocol": "Protocol"}
    actions = {
        "AddPortMapping": (which | entry, {}),
        "DeletePortMapping": (which, {}),
        "GetSpecificPortMappingEntry": (which, entry),
        "GetExternalIPAddress": ({}, {"NewExternalIPAddress": "Address"}),
    }
    written = ""
    for name, (taken, told) in actions.items():
        arguments = "".join(
            f"<argument><name>{argument}</name><direction>{direction}</direction>"
            f"<relatedStateVariable>{variable}</relatedStateVariable></argument>"
            for direction, group in (("in", taken), ("out", told))
            for argument, variable in group.items()
        )
        written += f"<action><name>{name}</name><argumentList>{arguments}</argumentList></action>"
    return f"""<?xml version="1.0"?><scpd xmlns="urn:schemas-upnp-org:service-1-0"><actionList>{written}</actionList>
      <serviceStateTable>{variables}</serviceStateTable></scpd>"""


SCPD = _scpd()


def write_rules(gateway: HomeGateway) -> None:
    """The table of ports as rules of nftables: what comes to an outer port goes to the computer inside."""
    rules = "\n".join(
        f'iifname "wan" tcp dport {outer} dnat to {host}:{inner}' for outer, (host, inner) in gateway.ports.items()
    )
    chain = f"chain entering {{ type nat hook prerouting priority dstnat; {rules}\n}}"
    table = f"add table ip mapped\ndelete table ip mapped\ntable ip mapped {{ {chain}\n}}\n"
    subprocess.run(["nft", "-f", "-"], input=table.encode(), check=True)


async def run(host: str, behaviour: Behaviour) -> None:
    gateway = HomeGateway(host, behaviour, changed=write_rules, nat_pmp_port=5351, ssdp_port=1900)
    async with gateway:
        print("ready", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="192.168.1.1")
    parser.add_argument("--outer", required=True)
    parser.add_argument("--speaks", default="NAT-PMP,UPnP")
    parser.add_argument("--refuses", action="store_true")
    chosen = parser.parse_args()
    behaviour = Behaviour(tuple(chosen.speaks.split(",")), chosen.outer, refuses=chosen.refuses)
    asyncio.run(run(chosen.host, behaviour))


if __name__ == "__main__":
    main()
