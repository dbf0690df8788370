"""`python -m benchmarks` runs every benchmark, `python -m benchmarks network dht` the named ones."""

from __future__ import annotations

import importlib
import os
import pkgutil
import platform
import sys

import benchmarks


def names() -> list[str]:
    found = (module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.ispkg)
    return sorted(name for name in found if not name.startswith("_"))


def main() -> int:
    wanted = [argument for argument in sys.argv[1:] if not argument.startswith("-")] or names()
    unknown = sorted(set(wanted) - set(names()))
    if unknown:
        print(f"no such benchmark: {', '.join(unknown)}; there are: {', '.join(names())}", file=sys.stderr)
        return 2
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the start")
    for name in wanted:
        print(f"\n== {name}", flush=True)
        importlib.import_module(f"benchmarks.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
