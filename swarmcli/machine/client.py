"""Asks a running peer of this user, over its API on this computer, with the token beside its entry in the registry.

Plain HTTP over the loopback by Python's own client: no proxy, no redirect, no other host can come between. Before the
token goes out, the process at the other end is checked to be the peer's: a dead peer's entry is removed.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any

from swarmcli.errors import ControlError
from swarmcli.machine.registry import LocalPeer, LocalPeers
from swarmcli.words import printable

SECONDS = 10.0  # seconds to wait for an answer


def get(peer: LocalPeer, path: str, *, registry: LocalPeers | None = None, timeout: float = SECONDS) -> Any:
    """Reads a path below /api/v1, for example "state". Raises ControlError."""
    return ask(peer, "GET", path, registry=registry, timeout=timeout)


def post(
    peer: LocalPeer, path: str, body: Mapping[str, Any], *, registry: LocalPeers | None = None, timeout: float = SECONDS
) -> Any:
    """Asks for a change: "pause", "resume", "stop". Raises ControlError."""
    return ask(peer, "POST", path, body, registry=registry, timeout=timeout)


def patch(peer: LocalPeer, path: str, body: Mapping[str, Any], *, registry: LocalPeers | None = None) -> Any:
    """Asks for a change: "limits". Raises ControlError."""
    return ask(peer, "PATCH", path, body, registry=registry)


def ask(
    peer: LocalPeer,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    registry: LocalPeers | None = None,
    timeout: float = SECONDS,
    most: int = 16 << 20,
) -> Any:
    """Makes one request. `timeout`: seconds that each read may wait. `most`: bytes of an answer; the longest is a list
    of a thousand peers. Raises ControlError that says what helps."""
    if not peer.lives:
        raise ControlError(f"{peer.label} has just ended")
    if peer.port is None:
        raise ControlError(f"{peer.label} is just starting and cannot be asked yet; try in a moment")
    token = (registry or LocalPeers()).token(peer)
    connection = http.client.HTTPConnection("127.0.0.1", peer.port, timeout=timeout)
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        connection.request(method, f"/api/v1/{path}", None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return _read(peer, answer.status, answer.read(most + 1), most)
    except (OSError, http.client.HTTPException) as error:
        raise ControlError(
            f"{peer.label} (process {peer.pid}) does not answer: {printable(str(error) or type(error).__name__)}; "
            "try again, and if it stays so, `swarm stop --now` ends it"
        ) from error
    finally:
        connection.close()


def _read(peer: LocalPeer, status: int, answer: bytes, most: int) -> Any:
    if len(answer) > most:
        raise ControlError(f"{peer.label} answers with more than {most} bytes; is it of another version?")
    if status == 200:
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise ControlError(f"the answer of {peer.label} cannot be read; is it of another version?") from error
    raise ControlError(f"{peer.label} refuses: {_why(answer) or f'status {status}'}")


def _why(answer: bytes) -> str:
    """Returns the words of a refusal: our own routes answer in JSON, what stands before them in plain text."""
    try:
        told = json.loads(answer)["detail"]
    except (ValueError, KeyError, TypeError, RecursionError):
        told = answer.decode("utf-8", "replace")
    return printable(str(told).strip(), 1000)
