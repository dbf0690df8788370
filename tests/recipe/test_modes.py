from __future__ import annotations

import pytest

from .recipes import SMALL, refused, small


def test_left_alone_a_run_is_synchronous_training() -> None:
    recipe = small()
    assert recipe.gradient_averaging.method == "plain" and not recipe.local_updates.enabled
    assert not recipe.delay.grad_averaging and not recipe.delay.step and not recipe.offloaded
    assert set(recipe.compression.model_dump().values()) == {"none"}
    assert recipe.averaging.average_state_every is None


def test_sparse_gradients_are_for_members_and_have_means_also_of_outer_steps() -> None:
    recipe = small("averaging.trust=members", "gradient_averaging={method: topk, k: 128, bits: 8, decay: 1}")
    settings = recipe.gradient_averaging
    assert (settings.k, settings.bits, settings.decay, recipe.aggregator) == (128, 8, 1.0, "mean")
    recipe = small("averaging.trust=members", TOPK, "outer={optimizer: sgd, momentum: 0, inner_batch_size: 8}")
    assert recipe.outer.takes_steps and recipe.gradient_averaging.method == "topk"


def test_delayed_averaging_delays_the_step_too_and_both_need_an_optimizer_in_host_memory() -> None:
    delayed = small("delay.grad_averaging=yes")
    assert delayed.delay.step and delayed.offloaded
    step_only = small("delay.optimizer_step=yes")
    assert step_only.delay.step and not step_only.delay.grad_averaging and step_only.offloaded
    assert small("local.offload_optimizer=yes").offloaded


LOCAL = "local_updates.enabled=yes"
TOPK, MEMBERS = "gradient_averaging.method=topk", "trust: members"
OUTER = "outer={optimizer: nesterov, inner_batch_size: 8}"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["gradient_averaging.method=signsgd"], "should be one of 'plain', 'powersgd', 'poweref' or 'topk'"),
        ([LOCAL, "ema_decay=0.9"], "peers average over epochs the weights that all of them hold alike"),
        (["gradient_averaging.rank=4"], "rank has no meaning for plain; remove it, or use method: powersgd or poweref"),
        (["gradient_averaging.k=64"], "k has no meaning for plain; remove it, or use method: topk"),
        (["gradient_averaging={method: poweref, bits: 4}"], "bits has no meaning for poweref; remove it, or use"),
        ([TOPK], "a median of sparse parts is zero wherever fewer than half of the members sent a number, and nothing"),
        ([TOPK], "add averaging.trust: members or access: invite, or use method: plain"),
        (
            [f"averaging={{{MEMBERS}, aggregator: {{name: median}}}}", TOPK, "averaging.aggregator.name=trimmed_mean"],
            "fewer than half of the members sent a number; use aggregator.name: mean with topk",
        ),
        ([f"averaging={{{MEMBERS}}}", TOPK, "compression.gradients=float16"], "topk says in gradient_averaging.bits"),
        ([f"averaging={{{MEMBERS}}}", TOPK, "averaging.target_group_size=8"], "topk needs one group of all peers,"),
        (["gradient_averaging.min_compression_ratio=0.1"], "min_compression_ratio has no meaning for plain"),
        (["delay={grad_averaging: yes, optimizer_step: no}"], "a step cannot come before its gradients are averaged"),
        (["gradient_averaging.method=powersgd", "averaging.target_group_size=8"], "powersgd needs one group of all"),
        (["averaging.target_group_size=8", "compression.state_averaging=float16"], "several groups have no common"),
        (["averaging.aggregator.trim=0.1"], "trim has no meaning without a name; remove it, or set name: trimmed_mean"),
        (["averaging.aggregator={name: median, gate: 5}"], "gate has no meaning for median; remove it"),
        (["averaging.aggregator={name: centered_clip, radius: 0}"], "averaging.aggregator.radius should be above 0"),
        (["gradient_averaging.method=powersgd", "averaging.aggregator.name=median"], "powersgd takes its matrices"),
        (["averaging.average_opt_statistics=[exp_avgs]"], "adamw keeps no statistic 'exp_avgs'; it has exp_avg and"),
        (["averaging.compression=float16"], "unknown key averaging.compression; did you mean compression.gradients?"),
        ([LOCAL, "gradient_averaging.method=plain"], "local updates average parameters, never gradients; remove"),
        ([LOCAL, "compression.gradients=float16"], "local updates send no gradients; set compression.state_averaging"),
        ([LOCAL, "delay.grad_averaging=yes"], "local updates step after every batch and wait for nobody then"),
        (["outer.optimizer=sgd"], "outer.inner_batch_size is missing; add `inner_batch_size: …`"),
        (["outer.lr=0.5"], "lr belongs to outer steps; add optimizer: sgd beside it, or remove lr"),
        ([OUTER, LOCAL], "local_updates.enabled has no use with outer steps: it is another way to train; remove it"),
        ([f"averaging={{{MEMBERS}}}", TOPK, OUTER], "method: topk, whose peers keep what they have not sent, while"),
        (
            [f"averaging={{{MEMBERS}}}", TOPK, "outer={optimizer: adam, momentum: 0, inner_batch_size: 8}"],
            "outer.momentum and adam do not go with gradient_averaging.method: topk",
        ),
        ([OUTER, "gradient_averaging.method=poweref"], "gradient_averaging.method has no use with outer steps"),
        ([OUTER, "delay.grad_averaging=yes"], "trainers go on during a round in any case"),
        ([OUTER, "averaging.average_state_every=2"], "all peers have the same anchor"),
        ([OUTER, "averaging.target_group_size=8"], "one anchor needs one group"),
        ([OUTER, "local.offload_optimizer=yes"], "the optimizer makes steps of the model itself"),
        ([OUTER, "local.site.processes=2"], "a peer that makes them is one process"),
    ],
)
def test_what_contradicts_itself_is_refused_where_it_is_written(overrides: list[str], words: str) -> None:
    said = refused(SMALL, *overrides)
    assert words in said and said.startswith(f"--set {overrides[-1]}")


def test_an_inner_step_is_made_up_of_whole_batches_and_an_outer_one_of_many() -> None:
    recipe = small("micro_batch_size=2", "outer={optimizer: adam, lr: 0.1, inner_batch_size: 8}")
    assert recipe.outer.takes_steps and recipe.outer.has_momentum
    said = refused(SMALL, "local.micro_batch_size=3", "outer={optimizer: sgd, inner_batch_size: 8}")
    assert "an inner step of 8 samples is not made up of 3 × 1" in said and "set local.micro_batch_size" in said
    said = refused(SMALL, "micro_batch_size=1", "target_batch_size=16", "outer={optimizer: sgd, inner_batch_size: 32}")
    assert "is larger than an outer step of the whole swarm (16); raise target_batch_size" in said


def test_a_line_is_named_where_a_file_contradicts_itself() -> None:
    text = f"{SMALL}local_updates:\n  enabled: true\ndelay:\n  optimizer_step: true\n"
    assert refused(text).startswith("small.yaml:14: local updates step after every batch")


def test_local_updates_may_delay_and_compress_the_averaging_of_states() -> None:
    recipe = small(LOCAL, "delay.state_averaging=no", "compression.state_averaging=float16",
                   "averaging={average_state_every: 2, average_opt_statistics: [exp_avg, exp_avg_sq]}")  # fmt: skip
    assert not recipe.delay.state_averaging and recipe.averaging.average_state_every == 2
