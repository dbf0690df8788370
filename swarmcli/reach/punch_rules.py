"""Which addresses two peers behind routers may name for a direct connection.

Pure logic, no I/O. What the other end names is hostile: it may be the address of somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from swarmcli.errors import AddressError
from swarmcli.network.addresses import Address, Scope, parse_address, scope_of
from swarmcli.reach.budgets import LEAST_PORT, MAX_NEARBY
from swarmcli.reach.verdict import Family, family_of

Pair: TypeAlias = tuple[Family, str, str]  # a family, and in it where this end and the other one are seen


def acceptable(text: str, own: str) -> Address | None:
    """The address where the other end says that it is seen, if this end may send a SYN there; else None. `own` is where
    this end is seen.

    Both must be of one scope: an end seen on the internet dials only there, and one seen in a private network (a
    company's, with routers inside) only in private networks.
    """
    try:
        theirs, ours = parse_address(text), parse_address(own)
    except AddressError:
        return None
    usual = theirs.scheme == ours.scheme and theirs.port >= LEAST_PORT
    alike = family_of(theirs.host) == family_of(ours.host) and scope_of(theirs.host) == scope_of(ours.host)
    named = theirs.scheme == "tcp" and scope_of(theirs.host) is None  # a host name: resolved for the user alone
    return theirs if usual and alike and not named else None


def pairs_of(own: Iterable[str], theirs: Iterable[str]) -> list[Pair]:
    """The families in which both ends have an acceptable address. IPv6 comes first: routers seldom translate it."""
    found: dict[Family, Pair] = {}
    for mine in own:
        for text in theirs:
            if (accepted := acceptable(text, mine)) is not None:
                family = family_of(accepted.host)
                found.setdefault(family, (family, mine, str(accepted)))
    return sorted(found.values(), key=lambda pair: pair[0] != "IPv6")


def behind_one_router(pairs: Iterable[Pair]) -> bool:
    """Whether both ends are seen at the same host. They may be in one LAN, where a router need not let a dial from
    inside to its outer address back in."""
    return any(parse_address(mine).host == parse_address(theirs).host for _, mine, theirs in pairs)


def nearby(addresses: Iterable[str], is_near: Callable[[str], bool]) -> tuple[str, ...]:
    """Those of the addresses, named by an end that may be in the same LAN, that are in a network of this machine;
    without loopback."""
    found: dict[str, None] = {}
    for text in addresses:
        try:
            address = parse_address(text)
        except AddressError:
            continue
        usual = address.direct and address.port >= LEAST_PORT and scope_of(address.host) is not Scope.HOST
        if usual and is_near(address.host):
            found[str(address)] = None
    return tuple(found)[:MAX_NEARBY]
