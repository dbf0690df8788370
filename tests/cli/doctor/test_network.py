"""What doctor says of this computer's line, by peers of a run."""

from __future__ import annotations

from pathlib import Path

from swarmcli.cli.doctor import network, run
from swarmcli.cli.doctor.finding import Context
from swarmcli.peer.home import Home
from swarmcli.peer.joining import join_run
from swarmcli.recipe import parse_link
from tests.recipe.recipes import small


def test_the_peers_of_a_run_tell_who_can_dial_in_and_how_fast_the_line_is(tmp_path: Path) -> None:
    (skipped,) = network.check_network(Context())
    assert skipped.outcome == "SKIP" and "--network" in skipped.text
    (nobody,) = network.check_network(Context(network=True))
    assert nobody.outcome == "SKIP" and "type: swarm doctor" in nobody.text
    recipe = small("local.host=127.0.0.1", f"output_dir={tmp_path}", directory=tmp_path)
    with join_run(recipe, "monitor", Home.at(tmp_path / "monitor")) as peer:
        link = peer.link()
        assert link is not None
        context = Context(target=str(link), network=True, link=parse_link(str(link)))
        (unreached,) = network.check_network(context)
        assert unreached.outcome == "SKIP" and "no contact" in unreached.text
        list(run.check_contacts(context))
        found = {each.check: each.text for each in network.check_network(context)}
    assert "dial" in found["IPv4"] and "router" in found
    assert found["rates"].startswith(f"{peer.peer_id.short}: ") and found["rates"].endswith("bit/s up")
