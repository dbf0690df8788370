"""One file for whoever helps: versions, findings, the last events and log lines, and nothing that is a secret.

What goes out is cut rather than kept: links, keys, tokens, addresses and names of other computers, this user's name and
home. Every line goes through `masking`, whatever it is of.
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
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil

from swarmcli.cli import service
from swarmcli.cli.doctor.finding import Context, Finding
from swarmcli.errors import SwarmError
from swarmcli.journal import JOURNAL_NAME, JournalReader
from swarmcli.network.addresses import parse_address
from swarmcli.words import printable

EVENTS, LOG_LINES, HOMES = 40, 80, 8  # of each home, of each service, that are looked into
MOST_LINE = 400  # characters
PACKAGES = ("swarmcli", "torch", "transformers", "numpy", "datasets", "cryptography", "msgspec", "pydantic")
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")  # in the name of a variable


def _remote(found: re.Match[str]) -> str:
    try:
        address = ip_address(found[0].partition("%")[0])
    except ValueError:  # a time of day has colons too
        return found[0]
    return found[0] if address.is_loopback or address.is_unspecified else "(address)"


# Patterns of secrets, and what stands in their place: of an address the scheme and the port, which say what is
# needed of it.
MASKED: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"(?s)-----BEGIN.*", "(a key)"),  # the rest is of the key too
    (r"(?i)swarm://[^\s\"'<>]*", "swarm://…"),
    (
        r"(?i)((?:token|secret|password|passwd|invite|control|bearer|authorization|api[_-]?key)\b[\"']?\s*[:= ]\s*"
        r"[\"']?)(?:bearer\s+)?[^\s\"'&]{4,}",
        r"\1…",
    ),
    (
        r"(?i)\b((?:tcp|relay|https?|wss?)://)(?:\[[^\]\s]*\]|[^\s\"'<>,;):/?#]*)(:\d{1,5}(?![^\s\"'<>,;)/?#]))?"
        r"[^\s\"'<>,;)]*",
        r"\1(address)\2",
    ),
    (r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+", "(mail)"),
    (r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)", _remote),
    (r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?:%\w+)?(?![\w:])", _remote),
)
# Drawn texts: long, and of letters and digits. Peer ids too; their beginning is how people call a peer anyway.
DRAWN = r"(?<![A-Za-z0-9])(?=[\w+-]*\d)(?=[\w+-]*[A-Za-z])([\w+-]{10})[\w+-]{10,}={0,2}"


def masking(secrets: Iterable[str] = (), names: Iterable[str] = ()) -> Callable[[str], str]:
    """Takes out of a text what others should not see. `secrets`: texts that stand in files and must not appear;
    `names`: of computers and people."""

    def one_of(texts: Iterable[str], least: int) -> str:
        longest_first = sorted({each for each in texts if len(each) >= least}, key=len, reverse=True)
        return "|".join(map(re.escape, longest_first)) or "(?!)"

    patterns = [
        (one_of(secrets, 4), "…"),
        (one_of([str(Path.home())], 2), "~"),
        *MASKED,
        (rf"(?i)(?<![A-Za-z0-9])(?:{one_of(names, 2)})(?![A-Za-z0-9])", "(name)"),
        (DRAWN, r"\1…"),
    ]

    def mask(text: str) -> str:
        for pattern, shown in patterns:
            text = re.sub(pattern, shown, text)
        return text

    return mask


def mask_of(context: Context) -> Callable[[str], str]:
    """Returns a function that masks in a text what should stay with this computer and the named run. Reads files that
    hold nothing but a secret, to find it there."""
    secrets = [value for name, value in os.environ.items() if SECRET.search(name.upper()) and len(value) >= 8]
    names = [socket.gethostname(), socket.getfqdn() if os.name == "nt" else "", platform.node()]
    with suppress(Exception):  # without a name in the system's list
        names.append(getpass.getuser())
    addresses = [*context.peers, *(context.link.addresses if context.link is not None else ())]
    if (recipe := context.recipe) is not None:
        addresses += [*recipe.network.initial_peers, *(recipe.local.announce_addresses or ())]
    files = sorted(context.registry.directory.glob("*.token"))[:200]
    for home in context.homes:
        files += [home / "dashboard.token", home.parent.parent / "invitation"]
        with suppress(OSError):  # whom its peer remembers
            addresses += re.findall(r"tcp://[^\s\"]+", (home / "contacts.json").read_text(errors="replace"))
    for file in files:
        with suppress(OSError, ValueError):
            secrets.append(file.read_text(encoding="utf-8")[:8192].strip())
    for address in addresses:
        with suppress(SwarmError):
            names.append(parse_address(address).host)
    return masking(secrets, names)


def collect(context: Context, findings: Iterable[Finding]) -> dict[str, Any]:
    """All that is in a report, masked."""
    mask, memory, system = mask_of(context), psutil.virtual_memory(), service.manager()

    def masked(value: Any) -> Any:
        match value:
            case str():
                return printable(mask(value), MOST_LINE)
            case list():
                return [masked(each) for each in value]
            case dict():
                return {key: masked(each) for key, each in value.items()}
        return value

    versions = {"Python": sys.version.split()[0], "system": platform.platform()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    report: dict[str, Any] = masked(
        {
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "computer": {
                "processors": os.cpu_count(),
                "memory_gb": round(memory.total / 1e9, 1),
                "memory_free_gb": round(memory.available / 1e9, 1),
            },
            "findings": [asdict(each) for each in findings],
            "run": _run(context),
            "peers": [_home(home) for home in context.homes[:HOMES]],
            "services": [
                {"name": name, "log": service.last_lines(system, name, LOG_LINES)} for name in service.installed(system)
            ],
        }
    )
    return report | {"versions": versions}


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
    for each in report["services"]:
        lines += ["", f"# service {each['name']}", *each["log"]]
    return "\n".join(lines) + "\n"
