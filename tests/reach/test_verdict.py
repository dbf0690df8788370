"""What follows from the evidence, without a network."""

from __future__ import annotations

import ipaddress

import pytest

from swarmcli.network.addresses import Scope
from swarmcli.reach.verdict import (
    AskedContact,
    ContactSighting,
    ReachVerdict,
    Surroundings,
    families,
    family_of,
    in_words,
    judge,
    network_of,
)

HOME = Surroundings(
    ("tcp://192.168.1.2:4000",),
    frozenset({"127.0.0.1", "::1", "192.168.1.2", "fe80::1"}),
    (ipaddress.ip_network("192.168.1.0/24"), ipaddress.ip_network("fe80::/64")),
)
PUBLIC = Surroundings(
    ("tcp://5.1.0.1:4000", "tcp://[2a00:1::1]:4000"),
    frozenset({"127.0.0.1", "5.1.0.1", "2a00:1::1"}),
    (ipaddress.ip_network("5.1.0.0/24"), ipaddress.ip_network("2a00:1::/64")),
)
OUTER = "tcp://5.2.0.1:4000"
TRANSLATED = ContactSighting("5.1.0.1", observed="5.2.0.1")  # a public contact that sees the home's router
NEIGHBOUR = ContactSighting("192.168.1.3", observed="192.168.1.2")


def asks(*outcomes: bool, address: str = OUTER) -> list[AskedContact]:
    """One ask per network: its dial came in, or did not."""
    return [AskedContact(f"net {number}", address, came) for number, came in enumerate(outcomes)]


def test_nobody_is_needed_without_contacts():
    home, public = judge("IPv4", HOME, []), judge("IPv4", PUBLIC, [])
    assert (home.dialable, home.scope, home.addresses) == (True, Scope.LAN, ("tcp://192.168.1.2:4000",))
    assert (public.dialable, public.scope, public.addresses) == (True, Scope.INTERNET, ("tcp://5.1.0.1:4000",))
    assert judge("IPv6", PUBLIC, []).addresses == ("tcp://[2a00:1::1]:4000",)


@pytest.mark.parametrize(
    "contact",
    [
        ContactSighting("127.0.0.1", observed="127.0.0.1"),
        ContactSighting("192.168.1.2", observed="192.168.1.2"),
        NEIGHBOUR,
        ContactSighting("10.9.0.1", observed="192.168.1.2"),  # another network of the same house, untranslated
        ContactSighting("192.168.1.7", came_in=True),
    ],
)
def test_a_peer_listens_at_once_within_its_own_network(contact: ContactSighting):
    verdict = judge("IPv4", HOME, [contact])
    assert (verdict.dialable, verdict.scope, verdict.how) == (True, Scope.LAN, "assumed")


def test_a_contact_on_the_same_machine_does_not_narrow_what_the_addresses_promise():
    alone, visited = (judge("IPv4", PUBLIC, seen) for seen in ([], [ContactSighting("127.0.0.1", came_in=True)]))
    assert alone == visited and visited.scope is Scope.INTERNET


@pytest.mark.parametrize(
    ("around", "contact"),
    [
        (HOME, TRANSLATED),
        (HOME, ContactSighting("10.9.0.1", observed="10.9.0.2")),  # a router behind the router
        (PUBLIC, ContactSighting("5.3.0.1", observed="5.1.0.1")),  # not translated, but perhaps filtered
    ],
)
def test_with_a_contact_beyond_it_is_a_client_until_the_opposite_is_proved(
    around: Surroundings, contact: ContactSighting
):
    assert judge("IPv4", around, [contact]).dialable is None
    assert judge("IPv4", around, [contact, NEIGHBOUR], []).dialable is None
    assert judge("IPv4", around, [contact], asks(False)) == ReachVerdict(
        "IPv4", Scope.INTERNET, False, (), "asked in vain", 1
    )
    proved = judge("IPv4", around, [contact], asks(True))
    assert (proved.dialable, proved.addresses, proved.how) == (True, (OUTER,), "dialed back")


@pytest.mark.parametrize(
    ("outcomes", "dialable"),
    [
        ((True, True, False), True),  # one that never dials, or whose dial is lost, changes nothing
        ((True, False), True),
        ((True, False, False), False),  # one has a way in that the others have not
        ((False, False, False), False),
    ],
)
def test_unlike_networks_decide_together(outcomes: tuple[bool, ...], dialable: bool):
    assert judge("IPv4", HOME, [TRANSLATED], asks(*outcomes)).dialable is dialable


def test_contacts_of_one_network_are_one_voice():
    liars = [AskedContact("5.9.0.0/16", OUTER, proved=False) for _ in range(5)]
    verdict = judge("IPv4", HOME, [TRANSLATED], [*liars, *asks(True)])
    assert verdict.dialable and verdict.networks == 2


def test_behind_a_forwarded_port_the_outer_address_is_learned_from_dial_backs():
    """Contacts dialed in at an address that this peer does not know: until it knows it, it announces its own."""
    came_in = [ContactSighting("5.2.0.1", came_in=True)]
    assert judge("IPv4", HOME, came_in).addresses == ("tcp://192.168.1.2:4000",)
    known = judge("IPv4", HOME, [*came_in, NEIGHBOUR], asks(True))
    assert known.addresses == (OUTER, "tcp://192.168.1.2:4000")  # the inner one for the neighbour


def test_most_networks_name_the_address():
    lie = AskedContact("net 9", "tcp://5.66.0.1:4000", proved=True)
    assert judge("IPv4", HOME, [TRANSLATED], [lie, *asks(True, True)]).address == OUTER


def test_two_networks_that_lie_do_not_move_a_peer_away_from_a_public_address_of_its_own():
    true, lie = "tcp://5.1.0.1:4000", "tcp://5.66.0.1:4000"
    told = [*asks(True, address=true), AskedContact("net 8", lie, proved=True), AskedContact("net 9", lie, proved=True)]
    seen = [ContactSighting("5.9.0.1", observed="5.1.0.1")]
    assert judge("IPv4", PUBLIC, seen, told).addresses == (true,)
    assert judge("IPv4", HOME, seen, told).addresses == (lie,), "behind a router most networks name it"


def test_where_nobody_would_dial_back_an_address_that_no_router_translates_is_assumed():
    seen = [ContactSighting("5.9.0.1", observed="5.1.0.1")]
    assert judge("IPv4", PUBLIC, seen).dialable is None, "before it was asked"
    assumed = judge("IPv4", PUBLIC, seen, unanswered=True)
    assert (assumed.dialable, assumed.how, assumed.addresses) == (True, "assumed", ("tcp://5.1.0.1:4000",))
    assert "; nobody outside has tried yet" in in_words([assumed], True, wished=False, relays=0)
    assert judge("IPv4", PUBLIC, seen, asks(False), unanswered=True).dialable is False, "silence is an answer"
    assert judge("IPv4", HOME, [TRANSLATED], unanswered=True).dialable is None
    liar = ContactSighting("5.9.0.1", observed="192.168.1.2")
    assert judge("IPv4", HOME, [liar], unanswered=True).dialable is None, "no contact beyond sees a private address"


def test_each_family_is_judged_by_itself():
    """A home with a translated IPv4 address and a filtered IPv6 one, and contacts of IPv4 alone."""
    both = Surroundings(("tcp://192.168.1.2:4000", "tcp://[2a00:2::2]:4000"), HOME.hosts, HOME.networks)
    unknown = judge("IPv6", both, [TRANSLATED])
    assert (unknown.dialable, unknown.how, unknown.addresses) == (None, "not checked", ())
    ask = AskedContact("2a00:1::/32", "tcp://[2a00:2::2]:4000", proved=True)
    assert judge("IPv6", both, [TRANSLATED], [ask]).addresses == ("tcp://[2a00:2::2]:4000",)
    assert families(both, [TRANSLATED], ()) == ["IPv4", "IPv6"]


def test_a_statement_is_believed_until_it_is_checked():
    stated = ("tcp://5.2.0.1:443",)
    assert judge("IPv4", HOME, [], stated=stated).addresses == stated
    assert judge("IPv4", HOME, [TRANSLATED], asks(False), stated).dialable is False
    proved = judge("IPv4", HOME, [TRANSLATED], asks(True, address=stated[0]), stated)
    assert (proved.addresses, proved.how) == (stated, "stated")


def test_networks_and_families_of_hosts():
    assert network_of("5.2.3.4") == network_of("5.2.200.1") == "5.2.0.0/16"
    assert network_of("2a00:1:2::3") == network_of("2a00:1:ff::3") == "2a00:1::/32"
    assert network_of("::ffff:5.2.3.4") == "5.2.0.0/16"
    assert [family_of(host) for host in ("5.2.3.4", "2a00::1", "peer")] == ["IPv4", "IPv6", "memory"]


LIAR = ContactSighting("192.168.1.66", observed="9.9.9.9")
UPSTAIRS = [ContactSighting(f"10.9.0.{number}", observed="192.168.1.2") for number in (1, 2)]  # untranslated


def test_a_liar_in_a_house_makes_no_client_of_its_neighbours():
    for sightings in ([LIAR], [NEIGHBOUR, LIAR], [*UPSTAIRS, ContactSighting("10.9.0.66", observed="9.9.9.9")]):
        verdict = judge("IPv4", HOME, sightings)
        assert (verdict.dialable, verdict.scope, verdict.how) == (True, Scope.LAN, "assumed")
        assert HOME.those_beyond(sightings) == []
    assert judge("IPv4", HOME, [*UPSTAIRS, LIAR], asks(False)).dialable, "whom it asked as it had met nobody else"
    translated = [ContactSighting(f"10.9.0.{number}", observed="10.9.0.2") for number in (3, 4, 5)]
    assert judge("IPv4", HOME, [*UPSTAIRS, *translated]).dialable is None
