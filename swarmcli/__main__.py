"""The command `swarm`, also as `python -m swarmcli`, for launchers that start modules."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Prints the help by itself if nothing else is asked for, before the libraries that parse options are imported."""
    if sys.argv[1:] in (["-h"], ["--help"]) and "_SWARM_COMPLETE" not in os.environ:
        from swarmcli.cli.verbs import help_text

        sys.stdout.write(help_text())
        return
    from swarmcli.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
