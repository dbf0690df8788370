"""The packets of NAT-PMP (RFC 6886) and of PCP's MAP (RFC 6887): how they are written, and what an answer means.

Both are small UDP packets of fixed layout to port 5351 of the gateway. Every reader returns None for a datagram that
is no answer to this question, and raises GatewayRefused for an answer that says no.
"""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass

from swarmcli.reach.mapping.gateway import GatewayError, GatewayRefused

SERVER_PORT = 5351
MAX_ANSWER = 1100  # bytes (RFC 6887, section 7)
NONCE_BYTES = 12

_TCP = 6  # the protocol's number with IANA
_RESPONSE = 0x80

_NAT_PMP, _PCP = 0, 2  # versions
_PMP_ADDRESS, _PMP_MAP_TCP = 0, 2  # operations
_PCP_MAP = 1

_PMP_QUESTION = struct.Struct("!BBHHHI")  # version, operation, reserved, inner port, outer port, seconds
_PMP_HEADER = struct.Struct("!BBHI")  # version, operation, result, seconds since the gateway's start
_PMP_MAPPED = struct.Struct("!HHI")  # inner port, outer port, seconds
_PCP_HEADER = struct.Struct("!BBHI16s")  # version, operation, reserved, seconds, this computer's address
_PCP_ANSWER = struct.Struct("!BBBBII12x")  # version, operation, reserved, result, seconds, seconds since the start
_PCP_BODY = struct.Struct("!12sB3xHH16s")  # nonce, protocol, inner port, outer port, outer address

_PMP_RESULTS = {
    1: "it does not speak this version",
    2: "port mapping is switched off",
    3: "it has no connection to the internet",
    4: "it has no port left",
    5: "it does not know the question",
}
_PCP_RESULTS = {
    1: "it does not speak this version",
    2: "it does not allow it",
    3: "it found the question malformed",
    4: "it does not know the question",
    7: "it has no connection to the internet",
    8: "it has no port left",
    9: "it maps no TCP ports",
    10: "this computer has its share of ports already",
    11: "the outer port or address is not to be had",
    12: "there is another router between it and this computer",
}


@dataclass(frozen=True, slots=True)
class Granted:
    """What a gateway granted."""

    port: int
    seconds: int
    host: str = ""  # IP literal; "" where the protocol asks for it apart


def pmp_address_question() -> bytes:
    return bytes([_NAT_PMP, _PMP_ADDRESS])


def pmp_map_question(port: int, wanted: int, seconds: int) -> bytes:
    """`seconds` 0 gives the port back; then `wanted` has to be 0 too (RFC 6886, section 3.4)."""
    return _PMP_QUESTION.pack(_NAT_PMP, _PMP_MAP_TCP, 0, port, wanted, seconds)


def pmp_address(answer: bytes) -> str | None:
    """The outer address that a gateway tells."""
    if not _pmp_answers(answer, _PMP_ADDRESS) or len(answer) != _PMP_HEADER.size + 4:
        return None
    return str(ipaddress.IPv4Address(answer[_PMP_HEADER.size :]))


def pmp_granted(answer: bytes, port: int) -> Granted | None:
    if not _pmp_answers(answer, _PMP_MAP_TCP) or len(answer) != _PMP_HEADER.size + _PMP_MAPPED.size:
        return None
    inner, outer, seconds = _PMP_MAPPED.unpack_from(answer, _PMP_HEADER.size)
    return Granted(_outer_port(outer, seconds), seconds) if inner == port else None


def _pmp_answers(answer: bytes, operation: int) -> bool:
    if not _PMP_HEADER.size <= len(answer) <= MAX_ANSWER:
        return False
    # The gateway's epoch says when it has forgotten everything. Whoever asks again every two minutes needs it not.
    version, answered, result, _ = _PMP_HEADER.unpack_from(answer)
    # A gateway that knows other versions only answers with one of these and result 1.
    if answered != _RESPONSE | operation or (version != _NAT_PMP and result != 1):
        return False
    if result:
        raise GatewayRefused(_PMP_RESULTS.get(result, f"result {result}"))
    return True


def pcp_map_question(local: str, port: int, wanted: int, seconds: int, nonce: bytes) -> bytes:
    """`local` is the address that the packet comes from. `seconds` 0 gives the port back."""
    own = ipaddress.ip_address(local)
    anywhere = ipaddress.ip_address("0.0.0.0" if own.version == 4 else "::")
    header = _PCP_HEADER.pack(_PCP, _PCP_MAP, 0, seconds, _as_ipv6(own))
    return header + _PCP_BODY.pack(nonce, _TCP, port, wanted, _as_ipv6(anywhere))


def pcp_granted(answer: bytes, port: int, nonce: bytes) -> Granted | None:
    if 4 <= len(answer) <= MAX_ANSWER and answer[0] == _NAT_PMP and answer[1] & _RESPONSE:
        # Gateways that speak NAT-PMP only answer in their own version (RFC 6886, section 3.5).
        raise GatewayRefused(_PCP_RESULTS[1])
    if not _PCP_ANSWER.size <= len(answer) <= MAX_ANSWER:
        return None
    version, operation, _, result, seconds, _ = _PCP_ANSWER.unpack_from(answer)
    if version != _PCP or operation != _RESPONSE | _PCP_MAP or len(answer) < _PCP_ANSWER.size + _PCP_BODY.size:
        return None
    echoed, protocol, inner, outer, host = _PCP_BODY.unpack_from(answer, _PCP_ANSWER.size)
    if (echoed, protocol, inner) != (nonce, _TCP, port):
        return None
    if result:
        raise GatewayRefused(_PCP_RESULTS.get(result, f"result {result}"))
    return Granted(_outer_port(outer, seconds), seconds, _from_ipv6(host))


def _outer_port(port: int, seconds: int) -> int:
    if port == 0 and seconds:
        raise GatewayError("it granted port 0")
    return port


def _as_ipv6(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bytes:
    """An IPv4 address is written as ::ffff:a.b.c.d (RFC 6887, section 5)."""
    return bytes(10) + b"\xff\xff" + address.packed if address.version == 4 else address.packed


def _from_ipv6(packed: bytes) -> str:
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address)
