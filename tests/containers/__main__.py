"""`python -m tests.containers`: the pods of overlays/kind as containers, under fire.

Needs a Docker daemon, kubectl for the manifests, and the images (`make images WITH_ETCD=1`); says
so and ends with status 0 where one is missing. On a private network the demo plays first. Then,
while messages flow, every service is killed, paused for 40 s and cut off for 40 s, in turn.
Everything confirmed has to be handled, in order, and nothing twice that does not say so. The result
goes to build/containers.json, and with `--page` to docs/containers.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from batonmq.common.health import SERVING
from tests.containers.docker import DockerFailed, Network, docker, missing, network
from tests.containers.flow import Flow
from tests.containers.page import page
from tests.containers.pods import K8S, REPO, Pod, pods, render
from tests.support.waiting import until

SERVICES = ("storage", "offsets", "lockmgr", "nameserver", "etcd")
PAUSE_S = 40.0
RESTART_S = 1.0
START_S, RECOVER_S, END_S = 90.0, 180.0, 300.0
RATE = 200
CLIENT = ("nameserver:9876",)
CLIENT_IMAGE = "batonmq/demo"
_PROBE = """
import asyncio, sys
from batonmq.channels import connect
from batonmq.common.health import ask_health
async def main():
    async with connect(sys.argv[1]) as channel:
        print(await ask_health(channel, service=sys.argv[2]))
asyncio.run(main())
"""


async def _lacking(tag: str) -> str:
    """What is missing for a run; empty if nothing is."""
    if shutil.which("kubectl") is None:
        return "there is no kubectl to render the manifests"
    if why := await missing():
        return why
    for name in ("services", "demo", "etcd"):
        try:
            await docker("image", "inspect", f"batonmq/{name}:{tag}")
        except DockerFailed:
            return f"there is no image batonmq/{name}:{tag}; make images WITH_ETCD=1"
    return ""


class Scene:
    """A cluster of containers."""

    def __init__(self, net: Network, members: list[Pod]) -> None:
        self.net, self.members = net, members

    async def start(self) -> float:
        """Start all at once; how long it takes until all are ready."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for pod in self.members:
                tasks.create_task(self.net.run(pod))
        await self.probing()
        for pod in self.members:
            await self.answers(pod, "readiness", START_S)
        return round(loop.time() - began_s, 1)

    async def probing(self) -> None:
        """Start the container that asks for health."""
        await self.net.client("prober", CLIENT_IMAGE, "sleep", "infinity")
        name = self.net.container("prober")
        await until(lambda: docker("ps", "--quiet", "--filter", f"name=^{name}$"), START_S)

    async def health(self, pod: Pod, kind: str) -> str:
        """What a probe of the manifest says now."""
        port, service = pod.probes[kind]
        address = f"{pod.names[0]}:{port}"
        prober = self.net.container("prober")
        return await docker("exec", prober, "python", "-c", _PROBE, address, service)

    async def answers(self, pod: Pod, kind: str, timeout_s: float) -> None:
        """Until a probe succeeds; at once for a pod without one.

        Raises:
            TimeoutError: it does not.
        """
        if kind not in pod.probes:
            return

        async def serves() -> bool:
            return await self.health(pod, kind) == SERVING

        await until(serves, timeout_s)

    async def baton(self, *words: str) -> str:
        """What the command prints, in a container."""
        prober = self.net.container("prober")
        return await docker("exec", prober, "baton", "--nameserver", *CLIENT, *words)

    async def demo(self) -> dict[str, Any]:
        """Play the demo from a container; its numbers."""
        process = await self.net.client(
            "demo", CLIENT_IMAGE, "baton", "--format", "json", "demo", "--nameserver", *CLIENT
        )
        out, _ = await process.communicate()
        return {**json.loads(out), "ok": process.returncode == 0}

    async def kill(self, pod: Pod) -> None:
        """As `kill -9`; and somebody starts it again."""
        await docker("kill", self.net.container(pod.name))
        await asyncio.sleep(RESTART_S)
        await docker("start", self.net.container(pod.name))

    async def pause(self, pod: Pod) -> None:
        """Let it stand still."""
        await docker("pause", self.net.container(pod.name))
        await asyncio.sleep(PAUSE_S)
        await docker("unpause", self.net.container(pod.name))

    async def cut(self, pod: Pod) -> None:
        """Let it run, alone."""
        await self.net.cut(pod.name)
        await asyncio.sleep(PAUSE_S)
        await self.net.mend(pod.name)


async def _strike(
    scene: Scene, flow: Flow, pod: Pod, name: str, strike: Callable[[Pod], Awaitable[None]]
) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await strike(pod)
    over_s = loop.time()
    await scene.answers(pod, "readiness", RECOVER_S)
    ready_s = loop.time()
    await flow.flows(RATE * 3, RECOVER_S)
    result = {
        "service": pod.service,
        "pod": pod.name,
        "strike": name,
        "lasted_s": round(over_s - began_s, 1),
        "ready_after_s": round(ready_s - over_s, 1),
        "flows_after_s": round(loop.time() - over_s, 1),
        "sent_stood_s": flow.stood_s("sent", began_s),
        "handled_stood_s": flow.stood_s("handled", began_s),
    }
    print(json.dumps(result), flush=True)
    return result


async def _play(options: argparse.Namespace) -> dict[str, Any]:
    members = pods(render(K8S / "overlays" / "kind"))
    async with network(options.network, options.tag) as net:
        scene = Scene(net, members)
        report: dict[str, Any] = {"containers": len(members), "start_s": await scene.start()}
        print(json.dumps(report), flush=True)
        report["status"] = await scene.baton("cluster", "status")
        report["demo"] = await scene.demo()
        print(json.dumps(report["demo"]), flush=True)
        report["strikes"] = []
        words = ("--nameserver", *CLIENT, "--rate", str(RATE), "--repeats")
        process = await net.client(
            "traffic", CLIENT_IMAGE, "python", "-m", "batonmq.demo.traffic", *words
        )
        flow = Flow(process)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(flow.follow())
            await flow.flows(RATE * 3, START_S)
            for service in options.services:
                pod = next(pod for pod in members if pod.service == service)
                for name, strike in (
                    ("kill", scene.kill),
                    ("pause", scene.pause),
                    ("disconnect", scene.cut),
                ):
                    report["strikes"].append(await _strike(scene, flow, pod, name, strike))
            await docker("kill", "--signal", "TERM", net.container("traffic"))
            async with asyncio.timeout(END_S):
                await process.wait()
        report["traffic"] = flow.verdict
        return report


def main() -> int:
    """Read the command line, run, report; the exit status."""
    parser = argparse.ArgumentParser(prog="tests.containers", description=__doc__)
    parser.add_argument("--tag", default="0.1.0", help="of the images")
    parser.add_argument("--network", default="baton-e2e", help="name of the network that is made")
    parser.add_argument("--services", nargs="+", default=SERVICES, choices=SERVICES)
    parser.add_argument("--page", action="store_true", help="write docs/containers.md")
    options = parser.parse_args()
    if why := asyncio.run(_lacking(options.tag)):
        print(f"e2e-containers skipped: {why}")
        return 0
    report = asyncio.run(_play(options))
    path = REPO / "build" / "containers.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    if options.page:
        (REPO / "docs" / "containers.md").write_text(page(report))
    good = bool(report["demo"]["ok"] and report["traffic"].get("ok"))
    print(json.dumps(report["traffic"]))
    print("OK: nothing lost, nothing twice unannounced." if good else "FAILED: see above.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
