"""`python -m swarmcli`: the command `swarm`, for launchers that start modules."""

from __future__ import annotations

from swarmcli.cli.main import main

if __name__ == "__main__":
    main()
