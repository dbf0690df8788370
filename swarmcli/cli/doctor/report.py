"""One file for whoever helps: versions, findings, the last events and log lines, and nothing that is a secret.

What goes out is cut rather than kept: links, keys, tokens, addresses and names of other computers, this user's name and
home. Every line goes through `Mask`, whatever it is of.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swarmcli.cli.doctor.finding import Context, Finding
from swarmcli.errors import SwarmError
from swarmcli.journal import JOURNAL_NAME, JournalReader
from swarmcli.words import printable

EVENTS, LOG_LINES, HOMES = 40, 80, 8  # of each home, of each service, that are looked into
MOST_LINE = 400  # characters
PACKAGES = ("swarmcli", "torch", "transformers", "numpy", "datasets", "cryptography", "msgspec", "pydantic")
CUT = "…"

_LINK = re.compile(r"swarm://[^\s\"'<>]*", re.IGNORECASE)
_PEM = re.compile(r"-----BEGIN.*", re.DOTALL)  # the rest is of the key too
_NAMED = re.compile(
    r"(?i)((?:token|secret|password|passwd|invite|control|bearer|authorization|api[_-]?key)\b[\"']?\s*[:= ]\s*[\"']?)"
    r"(?:bearer\s+)?[^\s\"'&]{4,}"
)
_ADDRESS = re.compile(r"\b(?:tcp|relay|https?|wss?)://[^\s\"'<>,;)]*", re.IGNORECASE)
_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)")
_IPV6 = re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?:%\w+)?(?![\w:])")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
# What is drawn: long, and of letters and digits. Peer ids too; their beginning is how people call a peer anyway.
_DRAWN = re.compile(r"(?<![A-Za-z0-9])(?=[\w+-]*\d)(?=[\w+-]*[A-Za-z])[\w+-]{20,}={0,2}")
_LOCAL = ("127.0.0.1", "0.0.0.0", "::1", "::")


class Mask:
    """Takes out of a text what others should not see."""

    def __init__(self, secrets: Iterable[str] = (), names: Iterable[str] = (), home: Path | None = None) -> None:
        """`secrets`: texts that stand in files and must not appear; `names`: of computers and people."""
        self._secrets = sorted({each for each in secrets if len(each) >= 4}, key=len, reverse=True)
        found = "|".join(sorted((re.escape(each) for each in set(names) if len(each) > 1), key=len, reverse=True))
        self._names = re.compile(rf"(?<![A-Za-z0-9])(?:{found})(?![A-Za-z0-9])", re.IGNORECASE) if found else None
        self._home = str(home or Path.home())

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, CUT)
        if len(self._home) > 1:
            text = text.replace(self._home, "~")
        text = _PEM.sub("(a key)", text)
        text = _LINK.sub(f"swarm://{CUT}", text)
        text = _NAMED.sub(rf"\1{CUT}", text)
        text = _ADDRESS.sub(_shortened, text)
        text = _MAIL.sub("(mail)", text)
        text = _IPV4.sub(_address, text)
        text = _IPV6.sub(_address, text)
        if self._names is not None:
            text = self._names.sub("(name)", text)
        return _DRAWN.sub(lambda found: found[0][:10] + CUT, text)


def _shortened(found: re.Match[str]) -> str:
    """The scheme and the port, which say what is needed of an address."""
    scheme, _, rest = found[0].partition("://")
    port = re.match(r"[^/]*?(:\d{1,5})?(?:[/?#]|$)", rest)
    return f"{scheme}://(address){port[1] or '' if port else ''}"


def _address(found: re.Match[str]) -> str:
    text = found[0]
    if text in _LOCAL or not (text.count(".") == 3 or _is_ipv6(text)):
        return text
    return "(address)"


def _is_ipv6(text: str) -> bool:
    """A time of day has colons too."""
    try:
        socket.inet_pton(socket.AF_INET6, text.partition("%")[0])
    except (OSError, ValueError):
        return False
    return True


def mask_of(context: Context) -> Mask:
    """What this computer and the named run have that should stay with them."""
    names = [socket.gethostname(), socket.getfqdn() if os.name == "nt" else "", platform.node()]
    with suppress(Exception):  # without a name in the system's list
        names.append(getpass.getuser())
    return Mask([*_secrets(context), *_kept_in_environment()], [*filter(None, names), *_hosts(context)])


def _hosts(context: Context) -> Iterator[str]:
    from swarmcli.network.addresses import parse_address

    addresses = list(context.peers)
    if context.link is not None:
        addresses += context.link.addresses
    if context.recipe is not None:
        addresses += [*context.recipe.network.initial_peers, *(context.recipe.local.announce_addresses or ())]
    for address in addresses:
        with suppress(SwarmError):
            yield parse_address(address).host
    for home in context.homes:  # whom its peer remembers
        with suppress(OSError):
            yield from re.findall(r"tcp://\[?([^/\]\"]+?)\]?:\d+", (home / "contacts.json").read_text(errors="replace"))


def _secrets(context: Context) -> Iterator[str]:
    """The content of files that hold nothing but a secret; a report reads them to leave it out."""
    files = [home / name for home in context.homes for name in ("dashboard.token",)]
    files += [home.parent.parent / "invitation" for home in context.homes]
    files += sorted(context.registry.directory.glob("*.token"))[:200]
    for file in files:
        with suppress(OSError, ValueError):
            yield file.read_text(encoding="utf-8")[:8192].strip()


def _kept_in_environment() -> Iterator[str]:
    secret = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")
    return (value for name, value in os.environ.items() if secret.search(name.upper()) and len(value) >= 8)


def collect(context: Context, findings: Iterable[Finding]) -> dict[str, Any]:
    """All that is in a report, masked."""
    mask = mask_of(context)
    found = {
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "computer": _computer(),
        "findings": [asdict(each) for each in findings],
        "run": _run(context),
        "peers": [_home(home) for home in context.homes[:HOMES]],
        "services": _services(),
    }
    masked = _masked(found, mask)
    assert isinstance(masked, dict)
    return masked | {"versions": _versions()}


def _masked(value: Any, mask: Mask) -> Any:
    match value:
        case str():
            return printable(mask(value), MOST_LINE)
        case list():
            return [_masked(each, mask) for each in value]
        case dict():
            return {key: _masked(each, mask) for key, each in value.items()}
    return value


def _versions() -> dict[str, str]:
    found = {"Python": sys.version.split()[0], "system": platform.platform()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _computer() -> dict[str, Any]:
    import psutil

    return {
        "processors": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "memory_free_gb": round(psutil.virtual_memory().available / 1e9, 1),
    }


def _run(context: Context) -> dict[str, Any]:
    if context.recipe is None:
        return {}
    model = context.recipe.base_model
    return {
        "run_id": context.recipe.run_id,
        "model": model if isinstance(model, str) else str(model.get("model_type")),
        "access": context.recipe.access,
        "limits": {key: str(value) for key, value in context.recipe.local.limits.written.items()},
    }


def _home(home: Path) -> dict[str, Any]:
    """The lives of a peer and its last events."""
    try:
        with JournalReader(home / JOURNAL_NAME) as reader:
            runs = reader.runs()
            last = reader.events(runs[-1].run_id, limit=EVENTS) if runs else []
    except SwarmError as error:
        return {"home": str(home), "journal": str(error)}
    return {
        "home": str(home),
        "lives": [
            f"{_moment(each.started)} {each.role} {each.version} {each.outcome or 'no end'}" for each in runs[-5:]
        ],
        "events": [f"{_moment(each.time)} {each.level} {each.text}" for each in last],
    }


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def _services() -> list[dict[str, Any]]:
    """The last lines of what each said."""
    from swarmcli.cli import service

    system = service.manager()
    return [{"name": name, "log": service.last_lines(system, name, LOG_LINES)} for name in service.installed(system)]


def as_text(report: dict[str, Any]) -> str:
    """For people."""
    lines = [f"swarm doctor, {report['written']}", ""]
    for each in report["findings"]:
        lines.append(f"{each['outcome']:<4}  {each['check']}: {each['text']}")
        lines += [f"      -> {each['fix']}"] if each["fix"] and each["outcome"] != "OK" else []
    for title in ("versions", "computer", "run"):
        lines += ["", f"# {title}", *(f"{key}: {value}" for key, value in report[title].items())]
    for peer in report["peers"]:
        lines += ["", f"# peer {peer['home']}", *([peer["journal"]] if "journal" in peer else [])]
        lines += [*peer.get("lives", ()), *peer.get("events", ())]
    for service in report["services"]:
        lines += ["", f"# service {service['name']}", *service["log"]]
    return "\n".join(lines) + "\n"
