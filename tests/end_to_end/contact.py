"""A public peer without a run: takes part in the hash table, prints its address, and ends when its input ends.

python -m tests.end_to_end.contact [FIRST CONTACT …]
"""

from __future__ import annotations

import sys

from swarmcli.dht import DHT


def main() -> None:
    with DHT(sys.argv[1:], start=True, relay=True) as dht:
        print(dht.endpoint.addresses[0], dht.peer_id.text, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
