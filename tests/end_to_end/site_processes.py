"""The processes of a site, looked at from outside."""

from __future__ import annotations

import socket

import psutil

from swarmcli.cli.processes import Child


def ranks(child: Child) -> dict[int, int]:
    """Rank → pid of the processes that a site's launcher has at present."""
    found = {}
    for process in _children(child.pid):
        try:
            rank = process.environ().get("RANK")
        except (psutil.Error, OSError):  # the process is ending
            continue
        if rank is not None:
            found[int(rank)] = process.pid
    return found


def listening(pid: int) -> set[tuple[str, int]]:
    """Address and port of all that the process listens on, or takes datagrams at."""
    sockets = [each for each in psutil.net_connections(kind="inet") if each.pid == pid]
    return {
        (each.laddr.ip, each.laddr.port)
        for each in sockets
        if each.status == psutil.CONN_LISTEN or (each.type == socket.SOCK_DGRAM and not each.raddr)
    }


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def alive(pids: list[int]) -> list[int]:
    """Returns those of the processes that have not ended."""
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
