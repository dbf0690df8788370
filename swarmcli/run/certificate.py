"""A certificate of a peer's own contribution: a file with what a monitor has signed, signed by the peer that shows it.

It proves that the monitor said so, and that whoever made the file holds the peer's key. It cannot prove that the
monitor told the truth: that depends on who it was.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec

from swarmcli.errors import UsageError
from swarmcli.files.durable import write_file
from swarmcli.network import wire
from swarmcli.network.identity import Identity, PeerID, verify
from swarmcli.run.contributions import Attestation

FILE = "contribution.json"  # in a home: what a monitor said when the peer last left
FORMAT = 2  # earlier versions read 1, in which rows do not say from which epoch on they count
MOST_ATTESTATIONS = 16  # this version writes one; earlier ones wrote what each monitor said


class ContributionCertificate(msgspec.Struct, frozen=True):
    """`whom`: for whom the owner made it, in words of its own; so it is of no use to anybody else."""

    format: int
    attestations: Annotated[tuple[Attestation, ...], msgspec.Meta(min_length=1, max_length=MOST_ATTESTATIONS)]
    whom: Annotated[str, msgspec.Meta(max_length=200)] = ""
    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""  # of the peer that it is about; b"": not signed

    @classmethod
    def make(cls, said: Attestation, identity: Identity | None = None, whom: str = "") -> ContributionCertificate:
        """`identity`: the key of the peer that the certificate is about, if it is at hand."""
        made = cls(FORMAT if said.since else 1, (said,), whom)
        if identity is None:
            return made
        return msgspec.structs.replace(made, signature=identity.sign("certificate", made._unsigned()))

    def _unsigned(self) -> bytes:
        return wire.encode(msgspec.structs.replace(self, signature=b""))

    @property
    def peer(self) -> PeerID:
        return self.attestations[0].peer

    @property
    def fault(self) -> str:
        """What is wrong with it; "": all signatures are good, and all are about one peer in one run."""
        first = self.attestations[0]
        for each in self.attestations:
            if not each.is_signed:
                return f"the peer {each.monitor.short} has not signed what it is said to have said"
            if (each.peer, each.run_id, each.run) != (first.peer, first.run_id, first.run):
                return "it mixes what was said of several peers or runs"
        if len({each.monitor for each in self.attestations}) != len(self.attestations):
            return "it counts one voice twice"
        if self.signature and not verify(self.peer, "certificate", self.signature, self._unsigned()):
            return f"the peer {self.peer.short} has not signed it"
        return ""

    def write(self, path: Path) -> None:
        """Writes the file. Raises UsageError where it cannot be written."""
        shown = msgspec.to_builtins(self, enc_hook=_encoded)
        try:
            write_file(path, f"{json.dumps({'swarm': 'contribution', **shown}, indent=2)}\n".encode())
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error

    @classmethod
    def read(cls, path: Path) -> ContributionCertificate:
        """Reads a file. Raises UsageError for one that is no certificate. `fault` tells whether its signatures are
        good."""
        try:
            if path.stat().st_size > 64 << 10:
                raise UsageError(f"{path} is no certificate of swarm: it is too large for one")
            value = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(value, dict) or value.pop("swarm", None) != "contribution":
                raise UsageError(f"{path} is no certificate of swarm; `swarm certificate` writes one")
            found = msgspec.convert(value, cls, dec_hook=_decoded)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, msgspec.ValidationError, RecursionError) as error:
            raise UsageError(f"{path} is no certificate of swarm, or it is damaged: {error}") from error
        if found.format not in (1, FORMAT):
            raise UsageError(f"{path} was written by another version of swarm (format {found.format}); update swarm")
        return found


def _encoded(value: Any) -> Any:
    if isinstance(value, PeerID):
        return value.text
    raise NotImplementedError(type(value))  # msgspec expects this error for a type that is no part of a certificate


def _decoded(kind: type, value: Any) -> Any:
    if kind is PeerID and isinstance(value, str):
        return PeerID.parse(value)
    raise NotImplementedError(kind)
