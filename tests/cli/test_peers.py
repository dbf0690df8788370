from __future__ import annotations

from pathlib import Path

import pytest
import typer

from swarmcli.cli.peers import LocalChoices, _port_of_dashboard
from swarmcli.errors import RecipeError
from swarmcli.recipe import load_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "stdlib-lm.yaml"


def test_choices_become_the_same_as_set() -> None:
    choices = LocalChoices("on: the sofa 🚀", "127.0.0.1", 0, ["tcp://203.0.113.7:31330"], True)
    local = load_recipe(RECIPE, choices.overrides()).local
    assert (local.name, local.host, local.port, local.client_mode) == ("on: the sofa 🚀", "127.0.0.1", 0, True)
    assert local.announce_addresses == ("tcp://203.0.113.7:31330",)


def test_the_router_is_asked_unless_it_is_told_otherwise() -> None:
    assert load_recipe(RECIPE, LocalChoices().overrides()).local.port_mapping is True
    assert load_recipe(RECIPE, LocalChoices(no_port_mapping=True).overrides()).local.port_mapping is False


def test_who_relays_depends_on_the_role_unless_it_is_said() -> None:
    assert load_recipe(RECIPE, LocalChoices().overrides()).local.relay is None
    assert load_recipe(RECIPE, LocalChoices(relay=True).overrides()).local.relay is True
    assert load_recipe(RECIPE, LocalChoices(relay=False).overrides()).local.relay is False


def test_what_is_not_chosen_stays_as_the_recipe_says() -> None:
    settings = ["local.port=4000", "local.client_mode=true", *LocalChoices().overrides()]
    local = load_recipe(RECIPE, settings).local
    assert (local.port, local.client_mode) == (4000, True)


def test_a_number_of_processes_makes_a_site_and_one_process_is_none() -> None:
    assert load_recipe(RECIPE, LocalChoices(processes=4).overrides()).local.site.processes == 4
    shared = RECIPE.with_name("site.yaml")
    assert load_recipe(shared, LocalChoices(processes=4).overrides()).local.site.zero
    alone = load_recipe(shared, LocalChoices(processes=1).overrides()).local.site
    assert (alone.processes, alone.zero) == (1, False)
    with pytest.raises(RecipeError, match=r"local\.site\.processes should be at least 1, not 0"):
        load_recipe(RECIPE, LocalChoices(processes=0).overrides())


def test_an_interface_where_a_port_belongs_is_told_its_own_option() -> None:
    assert (_port_of_dashboard("8080"), _port_of_dashboard(0)) == (8080, 0)
    with pytest.raises(typer.BadParameter, match=r"not '0\.0\.0\.0'; an interface is named by --web-host"):
        _port_of_dashboard("0.0.0.0")
