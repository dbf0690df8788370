"""The file from which newcomers install swarm, as long as the package index has none: the very code that runs here."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import swarmcli
from swarmcli.errors import UsageError

NAME = f"swarmcli-{swarmcli.__version__}-py3-none-any.whl"
BUILD = "`make wheel` builds it"


@dataclass(frozen=True, slots=True)
class Wheel:
    """Read once, when the operator names it: what is served later is what was checked and hashed."""

    data: bytes
    sha256: str

    @classmethod
    def read(cls, path: Path) -> Wheel:
        """Raises UsageError unless it is a wheel of the code that runs here."""
        try:
            if path.stat().st_size > 64 << 20:
                raise UsageError(f"--wheel {path}: larger than 64 MiB, so it is no wheel of swarm; {BUILD}")
            data = path.read_bytes()
            with zipfile.ZipFile(path) as archive:
                odd = next((name for name in archive.namelist() if not _is_ours(archive, name)), None)
        except (OSError, zipfile.BadZipFile) as error:
            raise UsageError(f"--wheel {path}: it cannot be read as a wheel ({error}); {BUILD}") from error
        if path.name != NAME or odd is not None:
            what = f"it has another {odd}" if odd is not None else f"a wheel of this version is called {NAME}"
            raise UsageError(f"--wheel {path}: it is not of the code that runs here, {what}; {BUILD}")
        return cls(data, hashlib.sha256(data).hexdigest())


def _is_ours(archive: zipfile.ZipFile, name: str) -> bool:
    """Whether a file of the package equals the one that runs here."""
    if name.startswith(f"swarmcli-{swarmcli.__version__}.dist-info/"):
        return True
    installed = Path(swarmcli.__file__).parents[1] / name
    return ".." not in name.split("/") and installed.is_file() and installed.read_bytes() == archive.read(name)
