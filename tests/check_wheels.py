"""Whether volunteers on Windows and macOS can install what the package needs: `make wheels`.

Asks the package index for a wheel of every library that is needed at run time, in the version that constraints.txt
pins, for each platform and Python. Ends with 1, and names them, if one is missing. Nothing is installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib.metadata import distribution

from packaging.requirements import Requirement

PLATFORMS = ("win_amd64", "macosx_14_0_arm64")
PYTHONS = ("3.11", "3.12", "3.13")


WINDOWS = {"extra": "", "sys_platform": "win32", "platform_system": "Windows"}


def needed(name: str) -> dict[str, str]:
    """Every library that `name` needs at run time here and elsewhere, with the version that is installed here."""
    found: dict[str, str] = {}
    waiting = [name]
    while waiting:
        for requirement in map(Requirement, distribution(waiting.pop()).requires or ()):
            # What only Linux needs, such as the packages of CUDA, is asked for nowhere else.
            wanted = requirement.marker is None or all(map(requirement.marker.evaluate, ({"extra": ""}, WINDOWS)))
            key = re.sub(r"[-_.]+", "-", requirement.name).lower()
            if wanted and key not in found:
                found[key] = distribution(key).version
                waiting.append(key)
    return found


def missing(platform: str, python: str, pins: list[str]) -> list[str]:
    """Those of `pins` for which the index has no wheel; asked one by one only where all together fail."""
    with tempfile.TemporaryDirectory() as nowhere:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        where = ["--only-binary=:all:", "--platform", platform, "--python-version", python, "--target", nowhere]
        if subprocess.run([*command, *where, *pins], capture_output=True).returncode == 0:
            return []
        return [pin for pin in pins if subprocess.run([*command, *where, pin], capture_output=True).returncode != 0]


def main() -> int:
    pins = [f"{name}=={version.partition('+')[0]}" for name, version in sorted(needed("swarmcli").items())]
    lacking = False
    for platform in PLATFORMS:
        for python in PYTHONS:
            without = missing(platform, python, pins)
            lacking = lacking or bool(without)
            print(f"{platform}, Python {python}: {'no wheel of ' + ', '.join(without) if without else len(pins)}")
    return int(lacking)


if __name__ == "__main__":
    sys.exit(main())
