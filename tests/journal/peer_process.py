"""A process with a journal, told what to do line by line. Run by test_processes.

`epoch N` records an epoch, `small` lets files grow no more, `large` lets them grow again, `flush` writes and says
whether that worked; every command is answered with a line.
"""

from __future__ import annotations

import resource
import signal
import sys
import time
from pathlib import Path

from swarmcli.events import EpochAdvanced, Event, Events, Noticed
from swarmcli.journal import Journal, RunRecord


def main(path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    events = Events()
    heard: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, Noticed):
            heard.append(f"{event.level}: {event.text}")

    events.subscribe(hear)
    run = RunRecord("stdlib-lm", "trainer", "a" * 52, "alice", "0.1.0")
    with Journal(path, run=run, clock=time.time) as journal:
        journal.listen(events)
        for line in sys.stdin:
            match line.split():
                case ["epoch", number]:
                    events.emit(EpochAdvanced(int(number), "ab" * 32, 1000, 400, 2, 2.5, 8.0, 0.25))
                    answer = "recorded"
                case ["small"]:
                    size = sum(each.stat().st_size for each in path.parent.iterdir())
                    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 4, resource.RLIM_INFINITY))
                    answer = "small"
                case ["large"]:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                    answer = "large"
                case ["flush"]:
                    answer = "written" if journal.flush(60) else "failed"
                case ["notices"]:
                    answer = " | ".join(heard)
            sys.stdout.write(answer + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
