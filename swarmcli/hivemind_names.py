"""Arguments of hivemind that have another name here, or that nothing here needs: the TypeError says so.

docs/coming-from-hivemind.md tells all other differences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_OPTIMIZER = {
    "use_local_updates": "grad_averager=None for local updates; without it gradients are averaged",
    "grad_averager_factory": "grad_averager, which takes a factory too",
}
_AVERAGER = {
    "averaging_expiration": "min_matchmaking_time",
    "compression_type": "compression, a codec such as Float16Compression()",
    "listen": "client_mode, which says the opposite",
}
_DHT = {
    "host_maddrs": "host and port: host='0.0.0.0', port=31330 for ['/ip4/0.0.0.0/tcp/31330']",
    "announce_maddrs": "announce_addresses: ['tcp://203.0.113.7:31330'] for ['/ip4/203.0.113.7/tcp/31330']",
    "bootstrap_timeout": "startup_timeout",
    "record_validator": "record_validators, a list",
}

# Arguments of hivemind's DHT, its node and its daemon.
_NOT_NEEDED = """
    p2p daemon num_workers node_id bucket_size depth_modulo parallel_rpc wait_timeout refresh_timeout cache_nearest
    cache_size cache_refresh_before_expiry cache_on_store reuse_get_requests chunk_size blacklist_time backoff_rate
    authorizer ensure_bootstrap_success strict auto_nat conn_manager dht_mode force_reachability idle_timeout
    nat_port_map relay_hop_limit tls use_auto_relay use_ipfs use_relay persistent_conn_max_msg_size quic use_relay_hop
    use_relay_discovery check_if_identity_free no_listen trusted_relays
"""

NEW_WORDS = {
    "Optimizer": _OPTIMIZER,
    "DecentralizedAverager": _AVERAGER,
    "DHT": {**dict.fromkeys(_NOT_NEEDED.split(), "nothing; leave it out"), **_DHT},
}


def names_new_words(class_name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates the constructor of a class: hivemind's name of an argument raises a TypeError that gives ours."""
    words = NEW_WORDS[class_name]

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def constructor(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in words.keys() & kwargs.keys():
                page = "docs/coming-from-hivemind.md"
                raise TypeError(f"{class_name}: what hivemind calls {name} is here {words[name]} ({page})")
            return function(*args, **kwargs)

        return constructor

    return decorate
