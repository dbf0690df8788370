"""Which way to train links allow: the arithmetic, by hand, and the order of the ways."""

from __future__ import annotations

import pytest

from swarmcli.recipe.advice import (
    WAYS,
    Volunteers,
    advise,
    advise_on,
    further_advice,
    keys_to_write,
    on_lines_of_homes,
    time_to_the_end,
)

from .recipes import small

COUNTED = "lr_scheduler.warmup_epochs=5", "checkpoint.every_epochs=30"
GPT2 = 86_000_000  # numbers: 344 MB


def test_the_arithmetic_is_that_of_a_round() -> None:
    advice = advise(GPT2, 512, 4, Volunteers(uplink=10e6 / 8, count=4, pace=2.0))
    plain, codes, _, every_15 = advice.ways
    # 344 MB to those who add up, of which three quarters leave the computer, and as much of averages.
    assert plain.nbytes == 344e6 and plain.sending == pytest.approx(344e6 * 1.5 / 1.25e6)
    assert codes.sending == pytest.approx(plain.sending * 1.002 / 4)
    assert plain.computing == codes.computing == 64.0 and every_15.computing == 15 * 64.0
    assert every_15.samples == 15 * 512 and every_15.inner_batch_size == 512 / 4


@pytest.mark.parametrize(
    ("mbit", "name"),
    [
        (100.0, "gradients in float32"),
        (20.0, "gradients in 8 bits"),
        (5.0, "gradients in 4 bits"),
        (2.0, "outer steps every 15 in 4 bits"),
        (0.3, "outer steps every 50 in 4 bits"),
    ],
)
def test_the_way_with_the_least_loss_that_the_links_allow_is_taken(mbit: float, name: str) -> None:
    advice = advise(11_000_000, 512, 8, Volunteers(mbit * 1e6 / 8, 4, 4.0))
    assert advice.chosen.way.name == name
    assert [each.way for each in advice.ways] == list(WAYS[: len(advice.ways)])
    assert all(each.sending > each.computing / 2 for each in advice.ways[:-1])
    assert advice.lines[-1].startswith("The last line is chosen: the first whose sending takes at most 50% of")
    assert [line for line in advice.lines if line.startswith("  ")] == [f"  {each}" for each in advice.ways]


def test_if_no_way_fits_the_last_is_taken_and_that_is_told() -> None:
    advice = advise(GPT2, 512, 8, Volunteers(1e4, 64, 100.0))
    assert advice.chosen.way == WAYS[-1] and "more than 50% of the time of computing: no way" in advice.lines[-1]


def test_own_steps_are_whole_micro_batches_and_an_epoch_is_made_of_them() -> None:
    for count in (2, 3, 7, 100):
        chosen = advise(GPT2, 512, 8, Volunteers(1e5, count, 1.0)).chosen
        assert chosen.inner_batch_size % 8 == 0 and chosen.way.steps > 1
        assert chosen.samples == chosen.way.steps * count * chosen.inner_batch_size


def test_how_long_lines_of_homes_are_busy_in_words() -> None:
    assert on_lines_of_homes(344_000_000) == "5 min at 10 Mbit/s, 55 s at 50 Mbit/s, 28 s at 100 Mbit/s"


def test_what_to_write_is_what_the_advised_recipe_has_and_nothing_where_it_has_it() -> None:
    recipe = small("target_batch_size=512", "max_epochs=600", "gradient_averaging.method=powersgd", *COUNTED)
    slow = Volunteers(2e6 / 8, 4, 8.0)
    advice = advise_on(recipe, 11_000_000, slow)
    assert keys_to_write(recipe, advice) == [
        "target_batch_size: 7680",
        "max_epochs: 40",
        "outer: {optimizer: sgd, inner_batch_size: 128}",
        "compression: {gradients: blockwise_4bit}",
    ]
    told = further_advice(recipe, advice)
    assert told[0] == "Remove gradient_averaging." and told[1] == (
        "Epochs are 15 times as long then: write lr_scheduler.warmup_epochs: 1, checkpoint.every_epochs: 2."
    )
    assert told[2].endswith("optimizer.name: muon and learning_rate: 0.003.")
    written = small(*COUNTED, *(line.replace(": ", "=", 1) for line in keys_to_write(recipe, advice)))
    assert keys_to_write(written, advise_on(written, 11_000_000, slow)) == []
    # 40 epochs of 7,680 samples, of which four volunteers compute 32 a second; they go on while a round runs.
    assert time_to_the_end(recipe, advice) == time_to_the_end(written, advice) == ["40 epochs take about 2.7 h then."]
    assert time_to_the_end(small("max_epochs=null"), advice) == []
    back = advise_on(written, 11_000_000, Volunteers(1e9, 4, 8.0))
    lines = ["target_batch_size: 512", "max_epochs: 600", "compression: {gradients: none}"]
    assert keys_to_write(written, back) == lines
    assert further_advice(written, back)[0] == "Remove outer." and further_advice(written, back)[1].endswith(
        "0.0667 times as long then: write lr_scheduler.warmup_epochs: 75, checkpoint.every_epochs: 450."
    )
