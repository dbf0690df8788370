from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from swarmcli import startup

ALLOCATING = """
import resource
from swarmcli import startup
startup.begin()
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    bytearray(20 << 20)
before = faults()
for _ in range(10):
    bytearray(20 << 20)
print(faults() - before)
"""


@pytest.mark.e2e
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
@pytest.mark.parametrize(("by_a_person", "keeps"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "1000000"}, False)])
def test_freed_memory_is_used_again_unless_a_person_has_said_otherwise(
    by_a_person: dict[str, str], keeps: bool
) -> None:
    """Ten times 20 MiB are 50,000 pages, if the system has to give them anew."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", ALLOCATING]
    done = subprocess.run(command, env=environment | by_a_person, capture_output=True, text=True, check=True)
    assert (int(done.stdout) < 1000) == keeps, done.stdout


def processor_time(*command: str) -> float:
    """Seconds that a process takes, the least of some: others disturb it."""
    import resource  # which Windows has not

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once() for _ in range(7))


@pytest.mark.skipif(sys.platform == "win32", reason="it tells no processor time of children")
def test_help_takes_no_more_than_three_starts_of_python() -> None:
    assert processor_time("-m", "swarmcli", "--help") <= 3 * processor_time("-c", "pass")


@pytest.mark.parametrize(("by_a_person", "turns"), [({}, startup.MANY_TURNS), ({"GOMP_SPINCOUNT": "5"}, "5")])
def test_teams_of_a_command_wait_longer_than_those_of_a_program_unless_a_person_has_said_otherwise(
    by_a_person: dict[str, str], turns: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"} | by_a_person
    code = "import os; from swarmcli import startup; startup.begin(); print(os.environ['GOMP_SPINCOUNT'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == turns


def test_a_process_without_a_home_or_temporary_files_has_both_where_its_runs_lie(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing() -> Path:
        raise RuntimeError("Could not determine home directory.")

    def unwritable() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(Path, "home", missing)
    monkeypatch.setattr("tempfile.gettempdir", unwritable)
    for name in ("HOME", "TMPDIR", "SWARM_DATA_DIR"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.delenv("SWARM_DATA_DIR")
    startup.find_places()
    assert os.environ["HOME"] == os.environ["TMPDIR"] == "/nowhere"
    monkeypatch.setenv("SWARM_DATA_DIR", str(tmp_path / "data"))
    startup.find_places()
    assert os.environ["HOME"] == os.environ["TMPDIR"] == str(tmp_path / "data") and (tmp_path / "data").is_dir()
