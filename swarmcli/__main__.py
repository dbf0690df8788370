"""The command `swarm`, also as `python -m swarmcli`, for launchers that start modules."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Help that is asked for alone answers before the libraries that read options are imported."""
    if sys.argv[1:] in (["-h"], ["--help"]) and "_SWARM_COMPLETE" not in os.environ:
        from swarmcli.cli.verbs import help_text

        sys.stdout.write(help_text())
        return
    from swarmcli.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
