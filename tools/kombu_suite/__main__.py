"""Run Kombu's own tests of transports on the transport of BatonMQ: `make kombu`.

    python -m tools.kombu_suite FOLDER

FOLDER has the source distribution of Kombu, of which the tests are run: t/integration/common.py. A
local cluster serves them. The exit status is that of pytest: 1 if a test fails that is not named as
refused, or if a refused one passes.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]


async def main(source: Path) -> int:
    """Run the tests and return the exit status."""
    if not (source / "t" / "integration" / "common.py").exists():
        print(f"the tests of Kombu are not in {source}: make kombu downloads them")
        return 1
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        options = ClusterOptions(
            etcd_fsync=False, settings={"storage": {"segment_bytes": 16 * 1024 * 1024}}
        )
        async with LocalCluster(Path(folder), options) as cluster:
            tests = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pytest", "-q", "-rx", "-c", os.devnull, "--rootdir", HERE),
                *("-p", "no:cacheprovider", HERE / "cases.py"),
                env={
                    **os.environ,  # noqa: TID251  handed on as a whole
                    "PYTHONPATH": f"{source}:{ROOT}",
                    "BATON_NAMESERVER": cluster.nameserver,
                },
            )
            return await tests.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(Path(sys.argv[1]).resolve())))
