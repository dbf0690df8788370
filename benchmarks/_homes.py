"""An internet with homes behind routers, on one machine: network namespaces, nftables and token buckets (tbf).

    with Internet(delay=0.02) as internet:                   # seconds from one site to another; 0 where not needed
        relay = internet.machine("relay")                     # 5.1.0.1 and 2a00:1::1, as everyone sees it
        north = internet.router("north", MASQUERADE, mbit=20)  # 5.2.0.1
        ann = north.machine("ann")                            # 192.168.1.2, as in every other home
        ann.run([sys.executable, "-c", "..."])                # waits, and returns what was printed
        ann.start(["swarm", "join", ...])                     # a Popen; killed with its group when the block ends
        Children().start(..., prefix=ann.prefix)              # or whatever else starts processes
        north.move()                                          # another outer address; connections through it are gone
        north.cut(); north.mend()                             # silence on the link, both ways

It needs no rights: everything is in a user namespace of its own (`unshare -Urn`). Each namespace is held by a `cat`
that ends when its standard input does, so nothing is left even where the process that made it all was killed.
`missing()` says why none of this is possible here.

The addresses of the internet are ones that `ipaddress` calls global, each site's in a /16 (or /32) of its own. Packets
to addresses that nobody has vanish without an answer, as they do in the world: a dial there has to time out.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from benchmarks import _namespaces as namespaces

GATEWAY = "5.255.255.1"  # of every site
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "tc", "nft")
PROBE = """
ip link add name left type veth peer name right
tc qdisc add dev left root tbf rate 1mbit burst 64kb latency 50ms
nft add table ip probe
nft add chain ip probe out '{ type nat hook postrouting priority srcnat; }'
nft add rule ip probe out masquerade fully-random
"""


@functools.cache
def missing() -> str | None:
    """What this machine lacks for such an internet; None if it has everything."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"no {', '.join(absent)} on this machine (see tests/provide_nftables.sh)"
    probe = subprocess.run(["unshare", "-Urn", "sh", "-ec", PROBE], capture_output=True, text=True)
    if probe.returncode:
        return "network namespaces with nftables are not permitted here: " + " ".join(probe.stderr.split())[:200]
    return None


@dataclass(frozen=True)
class RouterKind:
    """What a router does with IPv4; IPv6, where there is any, is never translated. Whatever comes from outside without
    being an answer is dropped, silently, except for forwarded ports."""

    name: str
    # Of nftables. Plain masquerade keeps the source port where it is free; the others choose one for each connection,
    # which nobody can guess ("symmetric"). None: the machines behind it have public addresses.
    translation: Literal["masquerade", "masquerade random", "masquerade fully-random"] | None
    ipv4: bool = True
    ipv6: bool = False
    # Whether a machine behind it reaches a forwarded port under the outer address.
    hairpin: bool = False


MASQUERADE = RouterKind("masquerade", "masquerade")
RANDOM = RouterKind("random", "masquerade random")
FULLY_RANDOM = RouterKind("fully-random", "masquerade fully-random")
FILTERED = RouterKind("filtered", None, ipv6=True)
HAIRPIN = replace(MASQUERADE, name="hairpin", hairpin=True)
DUAL_STACK = replace(MASQUERADE, name="dual stack", ipv6=True)  # as most homes today
IPV6_ONLY = RouterKind("ipv6 only", None, ipv4=False, ipv6=True)
KINDS = (MASQUERADE, RANDOM, FULLY_RANDOM, FILTERED, HAIRPIN, DUAL_STACK, IPV6_ONLY)


class _Namespace:
    """One network namespace, in which processes can be started."""

    def __init__(self, internet: Internet, name: str) -> None:
        self.internet = internet
        self.name = name
        enter = internet.prefix if internet is not self else ("unshare", "-Ur")
        # `cat` keeps the namespace until its input ends: when this process closes the pipe, or is gone.
        self._holder = subprocess.Popen(
            [*enter, "unshare", "-n", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            raise OSError(f"no network namespace for {name}: {missing()}")
        self.pid = self._holder.pid
        internet.holders.append(self._holder)
        self.sh(
            """
            ip link set lo up
            for all in all default; do
                echo 0 > /proc/sys/net/ipv6/conf/$all/accept_dad  # an address can be used at once
                echo 0 > /proc/sys/net/ipv6/conf/$all/autoconf
            done
            """
        )

    @property
    def prefix(self) -> tuple[str, ...]:
        """The words to put before a command, so that it runs in this namespace."""
        return ("nsenter", f"--target={self.pid}", "--user", "--net", "--preserve-credentials", "--")

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end. Raises CalledProcessError, with what it printed, where it fails."""
        options = {"check": True, "capture_output": True, "text": True, **options}
        try:
            return subprocess.run([*self.prefix, *command], **options)
        except subprocess.CalledProcessError as error:
            error.add_note(f"{error.stdout}\n{error.stderr}")
            raise

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command in a process group of its own, which `kill` or the end of the internet ends."""
        words = [*self.prefix, "setpriv", "--pdeathsig", "KILL", "--", *command]
        process = subprocess.Popen(words, start_new_session=True, **options)
        self.internet.started.append(process)
        return process

    def sh(self, script: str) -> None:
        try:
            self.run(["sh", "-ec", script])
        except subprocess.CalledProcessError as error:
            raise OSError(f"in {self.name}: {error.stderr.strip()}\n{script}") from error


class Internet(_Namespace):
    """Routes between all sites. Use as a context manager: at the end no process and no namespace is left."""

    def __init__(self, *, delay: float = 0.0) -> None:
        """`delay`: seconds that a packet takes from one site to another."""
        self.holders: list[subprocess.Popen[bytes]] = []
        self.started: list[subprocess.Popen[Any]] = []
        self._sites = 0
        super().__init__(self, "internet")
        self.sh(
            f"""
            echo 1 > /proc/sys/net/ipv4/ip_forward
            echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
            ip addr add {GATEWAY}/32 dev lo
            ip route add blackhole default
            ip -6 route add blackhole default
            nft add table inet cuts
            nft add chain inet cuts passing '{{ type filter hook forward priority 0; policy accept; }}'
            """
        )
        self.delay = delay
        if delay:
            self._delay_everything()

    def _delay_everything(self) -> None:
        # A process passes packets on, since not every kernel has netem; each site sends its own into the device.
        words = [sys.executable, "-m", "benchmarks._delay", str(self.delay)]
        process = self.start(words, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE)
        assert process.stdout is not None
        if not process.stdout.readline():
            raise OSError("packets cannot be delayed here: is there no /dev/net/tun?")
        self.sh(
            """
            ip link set dev delayed up  # first: from now on something comes out of the other
            ip link set dev delay up
            ip route add default dev delay table 100
            ip -6 route add default dev delay table 100
            """
        )

    def machine(self, name: str, *, mbit: float | None = None, ipv6: bool = True) -> Machine:
        """A machine that everyone can dial, with a link of so many Mbit/s each way (None: as fast as it goes)."""
        machine = Machine(self, name)
        machine.site = Site(machine, mbit, ipv4=True, ipv6=ipv6)
        machine.addresses = machine.site.addresses
        return machine

    def router(
        self,
        name: str,
        kind: RouterKind = MASQUERADE,
        *,
        mbit: float | None = None,
        behind: Router | None = None,
        lan: str = "192.168.1",
    ) -> Router:
        """A router of the internet, or one behind another (`behind`), which then should have a `lan` of its own."""
        return Router(self, name, kind, lan, mbit, behind)

    def number(self) -> int:
        self._sites += 1
        return self._sites

    def __enter__(self) -> Internet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.started:
            kill(process)
        for holder in reversed(self.holders):
            holder.communicate()


class Machine(_Namespace):
    """A computer: public (`Internet.machine`) or in somebody's home (`Router.machine`)."""

    site: Site  # the link to the internet: its own, or its router's
    addresses: tuple[str, ...] = ()  # IPv4 first; none of loopback or of the link

    @property
    def address(self) -> str:
        return self.addresses[0]


class Site:
    """A link to the internet, and the addresses that are routed over it."""

    def __init__(self, end: _Namespace, mbit: float | None, *, ipv4: bool, ipv6: bool) -> None:
        self._end = end
        self._internet = end.internet
        self._device = f"site{end.pid}"
        self.number = self._internet.number()
        self.ipv4 = f"5.{self.number}.0.1" if ipv4 else None
        self.ipv6 = f"2a00:{self.number}::1" if ipv6 else None
        self._internet.sh(
            f"""
            ip link add name {self._device} type veth peer name wan netns {end.pid}
            ip link set {self._device} up
            ip -6 addr add fe80::1/64 dev {self._device}
            """
        )
        end.sh("ip link set wan up; ip -6 addr add fe80::2/64 dev wan")
        if self._internet.delay:
            self._internet.sh("".join(f"ip {ip} rule add iif {self._device} lookup 100\n" for ip in ("-4", "-6")))
        if mbit is not None:
            self.shape(mbit)
        self._route_ipv4()
        if self.ipv6:
            end.sh(f"ip addr add {self.ipv6}/128 dev wan; ip -6 route add default via fe80::1 dev wan")
            self._internet.sh(f"ip -6 route add 2a00:{self.number}::/32 via fe80::2 dev {self._device}")

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(address for address in (self.ipv4, self.ipv6) if address)

    def shape(self, mbit: float, queue: int = namespaces.QUEUE, burst: int = namespaces.BURST) -> None:
        """From now on so many Mbit/s pass each way; see `shaping`."""
        self._end.sh(namespaces.shaping("wan", mbit, queue, burst))
        self._internet.sh(namespaces.shaping(self._device, mbit, queue, burst))

    def move(self) -> None:
        """Takes another IPv4 address and gives the old one up. IPv6 stays."""
        self._internet.sh(f"ip -4 route flush dev {self._device}")
        self._end.sh("ip -4 addr flush dev wan")  # and with it what conntrack has translated to this address
        self.ipv4 = f"5.{self._internet.number()}.0.1"
        self._route_ipv4()

    def _route_ipv4(self) -> None:
        if self.ipv4:
            self._end.sh(f"ip addr add {self.ipv4}/32 dev wan; ip route add default via {GATEWAY} dev wan onlink")
            network = self.ipv4.removesuffix(".0.1")
            self._internet.sh(f"ip route add {network}.0.0/16 via {self.ipv4} dev {self._device} onlink")

    def cut(self) -> None:
        """Nothing passes, and nobody is told."""
        self._internet.sh(
            f"""
            nft add rule inet cuts passing iifname {self._device} drop
            nft add rule inet cuts passing oifname {self._device} drop
            """
        )

    def mend(self) -> None:
        """Mends all links that were cut."""
        self._internet.sh("nft flush chain inet cuts passing")


class Router(_Namespace):
    """Stands between the machines of a home and the internet, or between them and another router."""

    def __init__(
        self,
        internet: Internet,
        name: str,
        kind: RouterKind,
        lan: str,
        mbit: float | None,
        behind: Router | None,
    ) -> None:
        super().__init__(internet, name)
        self.kind = kind
        self.addresses: tuple[str, ...] = ()  # in the LAN of the router before it, if there is one
        self._machines = 0
        self._forwarded: list[tuple[Machine, int]] = []
        if behind is None:
            self.site = Site(self, mbit, ipv4=kind.ipv4, ipv6=kind.ipv6)
        else:
            self.site = behind.site
            self.addresses = behind.plug(self, "wan")
        self._behind = behind
        self._lan_ipv4 = lan if kind.translation else f"5.{self.site.number}.1"
        self._lan_ipv6 = f"2a00:{self.site.number}:1:"
        self._make_lan()
        self._make_rules()

    @property
    def outside(self) -> tuple[str, ...]:
        """Its outer addresses, IPv4 first."""
        return self.site.addresses if self._behind is None else self.addresses

    def machine(self, name: str) -> Machine:
        machine = Machine(self.internet, name)
        machine.site = self.site
        machine.addresses = self.plug(machine, "eth0")
        return machine

    def plug(self, end: _Namespace, device: str) -> tuple[str, ...]:
        """Connects a machine or another router with the LAN; returns the addresses that it has there."""
        self._machines += 1
        place = self._machines + 1
        self.sh(
            f"""
            ip link add name plug{place} type veth peer name {device} netns {end.pid}
            ip link set plug{place} master lan up
            """
        )
        end.sh(f"ip link set {device} up")
        addresses = []
        if self.kind.ipv4:
            addresses.append(f"{self._lan_ipv4}.{place}")
            end.sh(f"ip addr add {addresses[-1]}/24 dev {device}; ip route add default via {self._lan_ipv4}.1")
        if self.kind.ipv6:
            addresses.append(f"{self._lan_ipv6}:{place}")
            end.sh(f"ip addr add {addresses[-1]}/64 dev {device}; ip -6 route add default via {self._lan_ipv6}:1")
        return tuple(addresses)

    def forward(self, machine: Machine | Router, port: int) -> None:
        """Lets connections from outside to this port pass: those to the outer IPv4 address go to the machine, at the
        same port; those to the machine's own addresses pass without translation. Routers in front of this one do the
        same."""
        self._forwarded.append((machine, port))
        self._make_rules()
        if self._behind is not None:
            self._behind.forward(self, port)

    def move(self) -> None:
        """Gives the router another outer IPv4 address: packets to the old one vanish, and so do connections."""
        if self.kind.translation is None:
            raise ValueError(f"{self.name} translates nothing: its machines would have to move")
        self.site.move()
        self._make_rules()

    def cut(self) -> None:
        self.site.cut()

    def mend(self) -> None:
        self.site.mend()

    def _make_lan(self) -> None:
        self.sh(
            """
            echo 1 > /proc/sys/net/ipv4/ip_forward
            echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
            ip link add name lan type bridge
            ip link set lan up
            """
        )
        if self.kind.ipv4:
            self.sh(f"ip addr add {self._lan_ipv4}.1/24 dev lan")
        if self.kind.ipv6:
            self.sh(f"ip addr add {self._lan_ipv6}:1/64 dev lan")

    def _make_rules(self) -> None:
        # The filter of an ordinary home router (OpenWrt's): what comes in has to be an answer, or to be forwarded.
        opened = " ".join(
            f"{'ip6' if ':' in address else 'ip'} daddr {address} tcp dport {port} accept\n"
            for machine, port in self._forwarded
            for address in machine.addresses
        )
        filters = f"""
            chain input {{ type filter hook input priority 0; policy drop;
                ct state established,related accept
                iifname {{ "lan", "lo" }} accept
                meta l4proto {{ icmp, ipv6-icmp }} accept
            }}
            chain forward {{ type filter hook forward priority 0; policy drop;
                ct state established,related accept
                ct state invalid drop
                iifname "lan" accept
                ct status dnat accept  # what a service for port mapping has opened in a table of its own
                {opened}
                meta l4proto {{ icmp, ipv6-icmp }} accept
            }}"""
        self._nft("inet home", filters)
        if self.kind.translation:
            self._nft("ip translation", self._translation())

    def _translation(self) -> str:
        inner, outer = f"{self._lan_ipv4}.0/24", self.outside[0]
        # Without a hairpin only what comes from outside is forwarded.
        came = "" if self.kind.hairpin else 'iifname "wan"'
        forwarded = "\n".join(
            f"{came} ip daddr {outer} tcp dport {port} dnat to {machine.addresses[0]}"
            for machine, port in self._forwarded
        )
        # What comes back through a hairpin has to get the router's address, or the answer would bypass the router.
        hairpin = f'oifname "lan" ip saddr {inner} ct status dnat masquerade' if self.kind.hairpin else ""
        return f"""
            chain entering {{ type nat hook prerouting priority dstnat; {forwarded}
            }}
            chain leaving {{ type nat hook postrouting priority srcnat;
                oifname "wan" {self.kind.translation}
                {hairpin}
            }}"""

    def _nft(self, table: str, chains: str) -> None:
        # The table is added first, so that deleting it succeeds whether or not it was there.
        self.sh(f"nft -f - <<'end'\nadd table {table}\ndelete table {table}\ntable {table} {{{chains}\n}}\nend")


def kill(process: subprocess.Popen[Any]) -> None:
    """Ends a process with its group, at once."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
