"""A program in a home: listens at a port, asks its router for it, says so, and gives it back when its input ends.

    python -m tests.reach.mapped_listener

It prints a line of JSON for each change: {"host", "port", "method", "problem"}.
"""

from __future__ import annotations

import asyncio
import json
import sys

from swarmcli.reach.mapping import MappingTimes, PortMapping

# The test waits for each of these, and the gateway of a busy machine may take its time to take a port back.
TIMES = MappingTimes(renew=1.0, retry=0.3, search=1.0, spacing=0.1, withdraw=60.0)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"home")
    writer.close()


async def tell(mapping: PortMapping) -> None:
    async for current in mapping.leases():
        place = {} if current is None else {"host": current.host, "port": current.port, "method": current.method}
        print(json.dumps({"host": "", "port": 0, "method": "", **place, "problem": mapping.problem}), flush=True)


async def main() -> None:
    server = await asyncio.start_server(serve, "0.0.0.0", 0)
    mapping = PortMapping(server.sockets[0].getsockname()[1], times=TIMES)
    telling = asyncio.create_task(tell(mapping))
    await asyncio.to_thread(sys.stdin.read)
    telling.cancel()
    await asyncio.wait([telling])
    await mapping.withdraw()
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
