from __future__ import annotations

import pytest

from swarmcli.recipe import fingerprint_of

from .recipes import SMALL, refused, small

FOUR = "local.site.processes=4"
LOCAL = "local_updates.enabled=yes"
LEVEL = "local.site.hierarchy={2: 4}"


def test_a_site_as_one_writes_it_or_leaves_it_which_is_not_compared_with_others() -> None:
    site = small().local.site
    assert (site.processes, site.zero, dict(site.hierarchy)) == (1, False, {})
    recipe = small("local.site={processes: 4, zero: yes}")
    assert (recipe.local.site.processes, recipe.local.site.zero) == (4, True)
    assert fingerprint_of(recipe) == fingerprint_of(small())
    site = small(LOCAL, "local.site={processes: 4, hierarchy: {8: 4, 2: 2}}").local.site
    assert list(site.hierarchy.items()) == [(2, 2), (8, 4)]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["local.site.proceses=4"], "unknown key local.site.proceses; did you mean processes?"),
        (["local.site.zero=yes"], "set processes to 2 or more"),
        ([FOUR, LOCAL, "local.site.hierarchy={2: 1, 4: 4}"], "local.site.hierarchy.2 should be at least 2, not 1"),
        ([FOUR, LOCAL, "local.site.hierarchy={2: 4, 4: 2}"], "groups of 2 every 4 steps cannot be made of the groups"),
        ([FOUR, LOCAL, "local.site.hierarchy={2: 2}"], "groups of 2 in a site of 4; the last group is the whole site"),
        ([FOUR, "local.site.hierarchy={2: 2, 4: 4}"], "without local updates the processes of a site never differ"),
        ([FOUR, LOCAL, "local.site.hierarchy={2: 4}", "local.offload_optimizer=yes"], "each process steps the model"),
        ([FOUR, LOCAL, LEVEL, "local.site.zero=yes"], "each process steps a model of its own and needs all statistics"),
        ([FOUR, "delay.grad_averaging=yes", "local.site.zero=yes"], "zero leaves no whole optimizer that delay could"),
        ([FOUR, "local.offload_optimizer=yes", "local.site.zero=yes"], "remove zero, or offload_optimizer"),
        ([FOUR, "ema_decay=0.9", "local.site.zero=yes"], "averages its weights over epochs (ema_decay), and with zero"),
        ([FOUR, "averaging.average_opt_statistics=[exp_avg_sq]", "local.site.zero=yes"], "averages statistics of"),
        ([FOUR, "local.device=cuda:1"], "cuda:1 is one device, and the site has 4 processes; write cuda"),
    ],
)
def test_a_site_that_cannot_be_is_refused_where_it_is_written(overrides: list[str], words: str) -> None:
    said = refused(SMALL, *overrides)
    assert words in said and said.startswith(f"--set {overrides[-1]}")


def test_the_line_of_a_level_that_does_not_fit_is_named() -> None:
    text = f"{SMALL}local_updates: {{enabled: true}}\nlocal:\n  site:\n    processes: 4\n    hierarchy:\n"
    said = refused(f"{text}      2: 2\n      8: 6\n")
    assert said.startswith("small.yaml:17: the longest period averages groups of 6")
