"""All-reduce and state download between processes over encrypted TCP, beside gloo and hivemind in the same run.

Each peer is a process of its own with one torch thread. The group is given: forming it is not measured here, except
in hivemind's figures, which contain what its `step` needs beyond `matchmaking_time`. gloo does not encrypt.

    python -m benchmarks.averaging [--profile]
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import multiprocessing
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch

from swarmcli.averaging.allreduce import Allreduce
from swarmcli.averaging.donor import StateDonor
from swarmcli.averaging.download import download_state
from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.partition import reducing_shares
from swarmcli.averaging.patience import AllreduceOptions
from swarmcli.averaging.service import AllreduceService
from swarmcli.averaging.snapshot import Snapshot
from swarmcli.compression import Float16Compression, NoCompression
from swarmcli.network import Endpoint, Identity, PeerID, PeerInfo
from swarmcli.network.tcp import TCPTransport

MIB = 1 << 20
ROUNDS = 5
# name, peers, bytes of float32, codec, at most this part of hivemind's time
CASES = [
    ("64 MiB, 4 peers", 4, 64 * MIB, NoCompression(), 0.35),
    ("64 MiB, 4 peers, float16", 4, 64 * MIB, Float16Compression(), 0.35),
    ("256 MiB, 2 peers", 2, 256 * MIB, NoCompression(), 0.40),
    ("1 MiB, 4 peers", 4, MIB, NoCompression(), 0.20),
]
STATE = 256 * MIB
_HERE = Path(__file__).parent
_PEERS_PYTHON = _HERE.parent / ".venv-peers" / "bin" / "python"


# ---- this project


def run_peer(index: int, case: int, pipe: Pipe, profile: bool) -> None:
    torch.set_num_threads(1)
    profiler = cProfile.Profile()
    if profile and index == 0:
        profiler.enable()
    asyncio.run(_average(index, case, pipe))
    if profile and index == 0:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


async def _average(index: int, case: int, pipe: Pipe) -> None:
    _, _, nbytes, codec, _ = CASES[case]
    tensors = [torch.full((nbytes // 16,), float(index)) for _ in range(4)]
    endpoint = Endpoint(TCPTransport(Identity.generate(), host="127.0.0.1"))
    service = AllreduceService(endpoint, "bench")
    await endpoint.start()
    service.start()
    everyone = await _introduce(endpoint, pipe)
    members = [Member(peer, addresses=addresses) for peer, addresses in everyone]
    await endpoint.connect(members[0].addresses[0], timeout=10) if index else None
    shares = reducing_shares(members, nbytes // 4)
    for number in range(ROUNDS + 1):
        group = Group.form(b"", members, shares, number.to_bytes(16, "big"))
        await asyncio.to_thread(pipe.recv)
        options = AllreduceOptions(compression=codec)
        began = time.perf_counter()
        result = await Allreduce(service, group, tensors, weight=1.0, options=options).run()
        pipe.send(time.perf_counter() - began)
        if abs(result.averages[0][0].item() - (len(members) - 1) / 2) > 1e-3:
            raise RuntimeError("a wrong average")
    await asyncio.to_thread(pipe.recv)
    service.close()
    await endpoint.close()


async def _introduce(endpoint: Endpoint, pipe: Pipe) -> list[tuple[PeerID, tuple[str, ...]]]:
    pipe.send((bytes(endpoint.peer_id), endpoint.info.addresses))
    everyone = [(PeerID(peer), tuple(addresses)) for peer, addresses in await asyncio.to_thread(pipe.recv)]
    for peer, addresses in everyone:
        endpoint.learn(PeerInfo(peer, addresses))
    return everyone


def measure_rounds(case: int, profile: bool) -> float:
    """Median seconds of a round, each as long as its slowest member took; the first is not counted."""
    processes, pipes = _start(run_peer, [(index, case) for index in range(CASES[case][1])], profile)
    places = [pipe.recv() for pipe in pipes]
    _tell(pipes, places)
    times = []
    for _ in range(ROUNDS + 1):
        _tell(pipes, "go")
        times.append(max(pipe.recv() for pipe in pipes))
    _tell(pipes, "end")
    _join(processes)
    return statistics.median(times[1:])


def run_state(index: int, case: int, pipe: Pipe, profile: bool) -> None:
    torch.set_num_threads(1)
    asyncio.run(_donate(pipe) if index == 0 else _download(pipe))


async def _donate(pipe: Pipe) -> None:
    endpoint = Endpoint(TCPTransport(Identity.generate(), host="127.0.0.1"))
    state = Snapshot(b"v", None, {f"{index}": torch.randn(STATE // 64) for index in range(16)})

    async def provide(version: bytes) -> Snapshot:
        return state

    donor = StateDonor(endpoint, "bench", provide)
    await endpoint.start()
    donor.start()
    await _introduce(endpoint, pipe)
    await asyncio.to_thread(pipe.recv)
    await asyncio.to_thread(pipe.recv)
    donor.close()
    await endpoint.close()


async def _download(pipe: Pipe) -> None:
    endpoint = Endpoint(TCPTransport(Identity.generate(), host="127.0.0.1"))
    await endpoint.start()
    donor = (await _introduce(endpoint, pipe))[0][0]
    await asyncio.to_thread(pipe.recv)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        await download_state(endpoint, "bench", [donor], timeout=60)
        times.append(time.perf_counter() - began)
    pipe.send(times)
    await asyncio.to_thread(pipe.recv)
    await endpoint.close()


def measure_state() -> tuple[float, float]:
    """Seconds of a first download, which the donor has to hash, and the least of two that share its snapshot."""
    processes, pipes = _start(run_state, [(0, 0), (1, 0)], False)
    _tell(pipes, [pipe.recv() for pipe in pipes])
    _tell(pipes, "go")
    times = pipes[1].recv()
    _tell(pipes, "end")
    _join(processes)
    return times[0], min(times[1:])


# ---- gloo


def run_gloo(index: int, case: int, pipe: Pipe, profile: bool) -> None:
    import torch.distributed as distributed

    torch.set_num_threads(1)
    _, peers, nbytes, _, _ = CASES[case]
    distributed.init_process_group("gloo", init_method=f"file://{pipe.recv()}", rank=index, world_size=peers)
    tensors = torch.full((nbytes // 4,), float(index))
    for _ in range(ROUNDS + 1):
        pipe.recv()
        began = time.perf_counter()
        distributed.all_reduce(tensors)
        tensors /= peers
        pipe.send(time.perf_counter() - began)
    pipe.recv()
    distributed.destroy_process_group()


def measure_gloo(case: int) -> float:
    processes, pipes = _start(run_gloo, [(index, case) for index in range(CASES[case][1])], False)
    with tempfile.TemporaryDirectory() as folder:
        _tell(pipes, str(Path(folder) / "rendezvous"))
        times = []
        for _ in range(ROUNDS + 1):
            _tell(pipes, "go")
            times.append(max(pipe.recv() for pipe in pipes))
        _tell(pipes, "end")
        _join(processes)
    return statistics.median(times[1:])


# ---- hivemind, in a virtual environment of its own


def measure_hivemind(peers: int, nbytes: int, half: bool) -> float:
    script = str(_HERE / "peers" / "averaging_hivemind.py")
    arguments = [str(_PEERS_PYTHON), script, str(peers), str(nbytes), "float16" if half else "none", str(ROUNDS)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=True)
    return float(json.loads(done.stdout.strip().splitlines()[-1])["seconds"])


# ---- the run


def _start(
    target: Callable[..., None], arguments: list[tuple[int, int]], profile: bool
) -> tuple[list[Any], list[Pipe]]:
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for index, case in arguments:
        mine, theirs = context.Pipe()
        process = context.Process(target=target, args=(index, case, theirs, profile), daemon=True)
        process.start()
        processes.append(process)
        pipes.append(mine)
    return processes, pipes


def _tell(pipes: list[Pipe], message: Any) -> None:
    for pipe in pipes:
        pipe.send(message)


def _join(processes: list[Any]) -> None:
    for process in processes:
        process.join(30)
        if process.exitcode != 0:
            raise RuntimeError(f"a peer ended with {process.exitcode}")


def main() -> None:
    profile = "--profile" in sys.argv
    print(f"{'':28}{'ours':>10}{'gloo':>10}{'hivemind':>10}{'ratio':>8}{'at most':>9}")
    for case, (name, peers, nbytes, codec, target) in enumerate(CASES):
        ours, gloo = measure_rounds(case, profile), measure_gloo(case)
        line = f"{name:28}{ours:>9.3f}s{gloo:>9.3f}s"
        if _PEERS_PYTHON.exists():
            theirs = measure_hivemind(peers, nbytes, codec.name == "float16")
            line += f"{theirs:>9.3f}s{ours / theirs:>8.2f}{target:>9.2f}"
        print(line, flush=True)
    first, second = measure_state()
    print(f"{'state of 256 MiB, one donor':28}{first:>9.3f}s, of a snapshot that is hashed already {second:.3f}s")


if __name__ == "__main__":
    main()
