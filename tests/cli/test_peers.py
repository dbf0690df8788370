from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from swarmcli.cli.peers import JoinOptions, MonitorOptions, PagedOptions, PeerOptions, _port_of_dashboard
from swarmcli.errors import CheckpointError, RecipeError, UsageError
from swarmcli.recipe import load_recipe
from swarmcli.recipe.limit_store import LimitStore, keep_limits
from swarmcli.training.resumed import Resume

RECIPE = Path(__file__).parents[2] / "recipes" / "stdlib-lm.yaml"


def options(**chosen: Any) -> PeerOptions:
    return PeerOptions(**{"recipe": "", "peer": [], "overrides": [], "announce": [], "limit": [], **chosen})


@pytest.mark.parametrize("verb", [JoinOptions, MonitorOptions])
def test_a_run_to_begin_from_is_named_with_its_checkpoint(verb: type[PagedOptions]) -> None:
    def begins_from(**chosen: Any) -> Any:
        return verb(recipe="", peer=[], overrides=[], announce=[], limit=[], web_name=[], **chosen).begins_from

    assert begins_from() is None
    assert begins_from(resume="latest") == Resume("latest")
    assert begins_from(resume="runs/old", from_run="old") == Resume("runs/old", "old")
    with pytest.raises(UsageError, match="--from-run old: name the checkpoint as well, --resume PATH"):
        begins_from(from_run="old")


@pytest.mark.parametrize("place", ["gone", "latest"])
def test_a_checkpoint_that_is_not_there_is_told_before_a_session_begins(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmcli.cli.session.session_of", lambda *_, **__: pytest.fail("the session begins"))
    given = MonitorOptions(recipe="", peer=[], overrides=[], announce=[], limit=[], web_name=[], resume=place)
    with pytest.raises(CheckpointError, match=f"--resume {place}: "):
        given.session("monitor", load_recipe(RECIPE, [f"output_dir={tmp_path}"]), [])


def test_choices_become_the_same_as_set_and_what_is_not_chosen_stays_as_the_recipe_says() -> None:
    announced = ["tcp://203.0.113.7:31330"]
    chosen = options(name="on: the sofa 🚀", host="127.0.0.1", port=0, announce=announced, client_mode=True)
    local = load_recipe(RECIPE, chosen.settings()).local
    assert (local.name, local.host, local.port, local.client_mode) == ("on: the sofa 🚀", "127.0.0.1", 0, True)
    assert local.announce_addresses == ("tcp://203.0.113.7:31330",)
    unchosen = options(overrides=["local.port=4000", "local.client_mode=true"])
    local = load_recipe(RECIPE, unchosen.settings()).local
    assert (local.port, local.client_mode, local.port_mapping, local.relay) == (4000, True, True, None)
    for relay in (True, False):
        assert load_recipe(RECIPE, options(relay=relay).settings()).local.relay is relay
    assert load_recipe(RECIPE, options(no_port_mapping=True).settings()).local.port_mapping is False


def test_a_number_of_processes_makes_a_site_and_one_process_is_none() -> None:
    assert load_recipe(RECIPE, options().settings(processes=4)).local.site.processes == 4
    shared = RECIPE.with_name("site.yaml")
    assert load_recipe(shared, options().settings(processes=4)).local.site.zero
    alone = load_recipe(shared, options().settings(processes=1)).local.site
    assert (alone.processes, alone.zero) == (1, False)
    with pytest.raises(RecipeError, match=r"local\.site\.processes should be at least 1, not 0"):
        load_recipe(RECIPE, options().settings(processes=0))


def test_an_interface_where_a_port_belongs_is_told_its_own_option() -> None:
    assert (_port_of_dashboard("8080"), _port_of_dashboard(0)) == (8080, 0)
    with pytest.raises(typer.BadParameter, match=r"not '0\.0\.0\.0'; an interface is named by --web-host"):
        _port_of_dashboard("0.0.0.0")


def test_options_are_stronger_than_set_and_that_is_stronger_than_the_users_file(here: Path) -> None:
    (here / "config.yaml").write_text("name: Ada\n")
    keep_limits({"upload": 9e6, "hours": "1-2"}, here / "config.yaml")
    typed = ["upload=1MB/s", "processor = 20%", "hours=22:00-08:00, sat 0-24"]
    with_set = ["local.limits.upload=7 MB/s", "local.limits.on_battery=no"]
    recipe = load_recipe(RECIPE, options(limit=typed, overrides=with_set, download="3 MB/s").settings())
    assert recipe.local.name == "Ada"
    limits = LimitStore(recipe).limits
    assert (limits.upload, limits.download, limits.processor, limits.on_battery) == (1e6, 3e6, 0.2, False)
    assert limits.hours == "22:00-08:00, sat 0-24"
    named = options(name="Grace", overrides=["local.name=Joan"])
    assert load_recipe(RECIPE, named.settings()).local.name == "Grace"
    for wrong, said in (("upload", "--limit upload: expected key=value"), ("up=1", "--limit up=1: there is no limit")):
        with pytest.raises(RecipeError, match=said):
            options(limit=[wrong]).settings()


def test_an_option_means_what_it_says_whatever_yaml_would_read() -> None:
    for name in ("null", "[x]", "a: b", '"quoted"', "2024"):
        assert load_recipe(RECIPE, options(name=name).settings()).local.name == name
    with pytest.raises(RecipeError, match=r"--set local\.port=70000: local\.port should be at most 65535, not 70000"):
        load_recipe(RECIPE, options(port=70000).settings())
