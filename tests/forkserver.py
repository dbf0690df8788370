"""The process from which processes of tests are forked, with what they use imported once."""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
# It is one for all tests of a process, and so is this list. Nothing in it may look at the terminal: that of the tests
# is not that of a peer.
CONTEXT.set_forkserver_preload(
    [
        "swarmcli",  # first: it sets what torch reads when it is loaded
        "torch._dynamo",  # which the first step of any optimizer imports
        "torch.distributed.optim",
        "torch.nn.parallel",
        "pytest",
        "safetensors.torch",
        "uvicorn",
        "coordinator_web.server",
        "swarmcli.peer.lifetime",
        "swarmcli.sharding",
        "swarmcli.sites.checkpoint",
        "swarmcli.sites.steps",
        "swarmcli.training.loop",
        "transformers.models.gpt2.modeling_gpt2",
        "tests.end_to_end.forked",
        "tests.sharding.processes",
    ]
)
