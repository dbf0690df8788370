"""What Windows lacks is hidden from the code, and then swarms run: one in memory, one over TCP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HIDDEN = """
import asyncio, contextlib, os, pkgutil, signal, socket, sys, time
# Other libraries look for the same modules as they are imported, and have their own ways where there are none.
import async_upnp_client.client_factory, cryptography.hazmat.primitives.serialization, fastapi, filelock, httpx
import platformdirs, psutil, rich.live, segno
import torch, torch.distributed, transformers, typer, uvicorn

for module in ("fcntl", "termios", "resource", "pwd", "grp", "pty", "tty", "syslog", "_posixshmem"):
    sys.modules[module] = None
for owner, names in (
    (os, ("fork", "register_at_fork", "geteuid", "getuid", "getegid", "pwrite", "pread", "preadv", "killpg", "setsid",
          "O_DIRECTORY", "fchmod", "mkfifo", "sched_getaffinity")),
    (signal, ("SIGKILL", "SIGHUP", "SIGALRM", "SIGCHLD", "SIGUSR1", "pthread_sigmask")),
    (socket, ("SO_REUSEPORT",)),
    (time, ("clock_gettime", "CLOCK_BOOTTIME", "CLOCK_MONOTONIC")),
):
    for name in names:
        with contextlib.suppress(AttributeError):
            delattr(owner, name)


def cannot_watch(self, *_):
    raise NotImplementedError  # as the loop of Windows says


for kind in (asyncio.AbstractEventLoop, asyncio.SelectorEventLoop):
    kind.add_reader = kind.add_signal_handler = cannot_watch

import coordinator_web, swarmcli

for package in (swarmcli, coordinator_web):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            __import__(module.name)
"""

MEMORY_SWARM = """
from swarmcli.averaging import AveragerConfig, AveragerCore, RoundRequest
from swarmcli.testing import Swarm, run


async def average():
    async with Swarm(seed=1) as swarm:
        config = AveragerConfig(prefix="t")
        cores = [await swarm.start(AveragerCore([torch.ones(9)], await swarm.node(), config)) for _ in range(3)]
        for control in [core.begin_round(RoundRequest()) for core in cores]:
            await control


run(average(), seed=1, timeout=600)
print("memory")
"""

TCP_SWARM = """
import pathlib
from swarmcli.peer.home import Home

place = pathlib.Path(sys.argv[1])
first = swarmcli.DHT(start=True, host="127.0.0.1", identity_path=place / "identity.key")
second = swarmcli.DHT(first.get_visible_addresses(), start=True, host="127.0.0.1")
tensors = [[torch.zeros(100_000)], [torch.ones(100_000)]]
averagers = [
    swarmcli.DecentralizedAverager(own, dht, start=True, prefix="t", target_group_size=2)
    for own, dht in zip(tensors, (first, second), strict=True)
]
for control in [averager.step(wait=False) for averager in averagers]:
    assert control.result(60) is not None
assert all(torch.equal(own[0], torch.full((100_000,), 0.5)) for own in tensors)
with Home.claim(place, "trainer"):
    pass
for each in (*averagers, second, first):
    each.shutdown()
print("tcp")
"""


@pytest.mark.e2e
def test_swarms_run_where_there_is_nothing_of_posix(tmp_path: Path) -> None:
    code = HIDDEN + MEMORY_SWARM + TCP_SWARM
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["memory", "tcp"]
