from __future__ import annotations

import re

import pytest

from swarmcli.errors import AddressError
from swarmcli.network.addresses import Scope
from swarmcli.network.identity import Identity
from swarmcli.recipe import Link, is_link, parse_link
from swarmcli.recipe.link import MOST_CHARACTERS, places_of, scope_of_places
from swarmcli.recipe.run_key import RunKey
from swarmcli.recipe.ticket import Ticket

PEER = Identity.from_seed(1).peer_id
DIGEST = "abcdefghijklmnopqrstuvwxyz234567"
TEXT = f"swarm://{PEER.text}@203.0.113.7:31330,2001:db8::7:31330,example.org:4/my-run.2/fingerprint={DIGEST}"
KEY = RunKey(Identity.from_seed(2).private_key)
TICKET = Ticket.for_bearer(KEY.public, *KEY.invite_bearer(DIGEST, PEER, 2_000_000_000))
FOR_ONE = Ticket(KEY.public, KEY.invite(DIGEST, PEER, 2_000_000_000).invitation)
PLACES = ("203.0.113.7:31330", "[2001:db8::7]:31330", "example.org:4")


def test_a_link_is_read_and_written_as_it_was() -> None:
    link = parse_link(TEXT)
    assert link == Link(PEER, PLACES, "my-run.2", DIGEST)
    assert str(link) == TEXT
    assert link.addresses[1] == f"tcp://[2001:db8::7]:31330/{PEER.text}"


OTHERS = [Identity.from_seed(seed).peer_id for seed in (3, 4, 5)]
SEVERAL = f"{TEXT}/peer=" + ",".join(f"{peer.text}@2001:db8::{n}:7,h{n}:8" for n, peer in enumerate(OTHERS))
OLD = TEXT.replace("2001:db8::7", "[2001:db8::7]").replace("/finger", "?finger")


def test_a_link_names_up_to_four_peers_of_the_run() -> None:
    link = parse_link(SEVERAL)
    assert link.others[1] == (OTHERS[1], ("[2001:db8::1]:7", "h1:8"))
    assert str(link) == SEVERAL
    assert parse_link(OLD + "".join(f"&peer={p.text}@[2001:db8::{n}]:7,h{n}:8" for n, p in enumerate(OTHERS))) == link
    assert [each.peer_id for each in link.each] == [PEER, *OTHERS] and not any(each.others for each in link.each)
    assert link.addresses[-1] == f"tcp://h2:8/{OTHERS[2].text}" and len(link.addresses) == 9
    assert link.each[0] == parse_link(TEXT) and parse_link(TEXT).each == (parse_link(TEXT),)


@pytest.mark.parametrize("kind", ["bearer", "one peer"])
def test_a_link_carries_an_invitation_and_shows_no_secret_by_accident(kind: str) -> None:
    ticket = TICKET if kind == "bearer" else FOR_ONE
    link = Link(PEER, PLACES, "my-run.2", DIGEST, ticket)
    assert parse_link(str(link)) == link and len(str(link)) < MOST_CHARACTERS / 3
    assert not ticket.secret or repr(ticket.secret)[2:10] not in repr(link)
    card = ticket.card(DIGEST, PEER)
    assert card.invitation.is_genuine(ticket.run(DIGEST)) and bool(card.claim) == (kind == "bearer")


def test_a_link_holds_no_character_that_means_anything_to_a_shell() -> None:
    for link in (parse_link(SEVERAL), Link(PEER, PLACES, "my-run.2", DIGEST, TICKET)):
        assert set(re.sub(r"\w", "", str(link), flags=re.ASCII)) <= set(":/@.,=-")


def test_what_mail_and_shells_leave_around_a_link_does_no_harm_and_a_recipe_is_no_link() -> None:
    for around in ("{} \n", "'{}'", '"{}"', "<{}>", "`{}`", "\u201c{}\u201d"):
        text = around.format(TEXT)
        assert is_link(text) and parse_link(text) == parse_link(TEXT)
    assert not is_link("recipes/swarm.yaml") and not is_link("swarm:/x") and is_link("SWARM://x")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tcp://203.0.113.7:1", "is no link"),
        (f"swarm://{PEER.text}/run", "names no peer"),
        (TEXT.replace(PEER.text, "abc"), "is no peer id"),
        (TEXT.replace("203.0.113.7:31330", "203.0.113.7"), "no port"),
        (TEXT.replace("203.0.113.7:31330", "user@203.0.113.7:31330"), "no host name"),
        (TEXT.replace("203.0.113.7:31330", "[fe80::1%eth0]:31330"), "one machine's own interface"),
        (TEXT.replace(":31330,", ":0,"), "no port"),
        (TEXT.replace("@203", "@" + ",".join(f"h:{n}" for n in range(1, 7)) + ",203"), "at most 8 addresses"),
        (TEXT.replace("my-run.2", "../../x"), "names no run"),
        (TEXT.replace("my-run.2", ""), "names no run"),
        (TEXT.partition("/finger")[0], "lacks its fingerprint"),
        (TEXT[:-1], "has 32 characters"),
        (TEXT + "/fingerprint=" + DIGEST[::-1], "comes once"),
        (TEXT + "/invitation=abc", "parameter 'invitation' that this version"),
        (TEXT + "/invite=abc", "invitation of the link cannot be read"),
        (TEXT + f"/invite={TICKET.encode()}/invite={FOR_ONE.encode()}", "carries one invitation"),
        (SEVERAL + f"/peer={Identity.from_seed(6).peer_id.text}@h:1", "at most 4 peers"),
        (TEXT + f"/peer={PEER.text}@h:1", "names a peer twice"),
        (TEXT + f"/peer={OTHERS[0].text}@" + ",".join(f"h:{n}" for n in range(1, 10)), "at most 8 addresses"),
        (TEXT + f"/peer={OTHERS[0].text}@h:1/invite={TICKET.encode()}", "with an invitation names one peer"),
        (TEXT + "/\x1b[31m", "characters that no link has"),
        (TEXT + "/=" + "x" * 3000, "at most 2048 characters"),
        ("swarm://" + "é", "characters that no link has"),
    ],
    # By what is said: invitations are drawn anew by each worker of pytest, and all have to collect the same names.
    ids=lambda value: "link" if "://" in value else value,
)
def test_what_is_wrong_with_a_link_is_said(text: str, words: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_link(text)
    assert words in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


def test_a_peers_link_names_first_what_most_can_dial_and_loopback_only_for_want_of_others() -> None:
    local, lan, public = "tcp://127.0.0.1:1", f"tcp://192.168.1.4:1/{PEER.text}", "tcp://[2001:4860:4860::8888]:1"
    assert places_of([local, lan, public]) == ("[2001:4860:4860::8888]:1", "192.168.1.4:1")
    assert places_of([local]) == ("127.0.0.1:1",) and places_of([]) == ()
    assert places_of([lan, "tcp://home.example.org:1"])[0] == "home.example.org:1"
    assert scope_of_places(["monitor:1"]) == Scope.LAN and scope_of_places(["localhost:1"]) == Scope.HOST
    assert len(places_of([f"tcp://10.0.0.{n}:1" for n in range(9)])) == 4
    scopes = [scope_of_places(places_of(each)) for each in ([local], [local, lan], [local, lan, public])]
    assert scopes == [Scope.HOST, Scope.LAN, Scope.INTERNET]


def test_a_link_that_was_cut_off_in_copying_is_to_be_copied_whole() -> None:
    whole = {len(TEXT), SEVERAL.index("/peer=")}
    for end in range(len("swarm://"), SEVERAL.index(",h0") - 1):
        if end not in whole:
            with pytest.raises(AddressError, match=r"copy (all of )?the link"):
                parse_link(SEVERAL[:end])
