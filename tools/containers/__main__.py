"""`python -m tools.containers`: the pods of overlays/kind-secure as containers, with faults.

Needs a Docker daemon, kubectl for the manifests, openssl, and the images (`make images
WITH_ETCD=1`); says so and ends with status 0 where one is missing. On a private network, with TLS
everywhere and access on, the demo runs first. Then, under load, every service is killed, paused
for 40 s and disconnected for 40 s, in turn; all certificates are replaced, and callers without
permission must be rejected. Every acknowledged message must be handled, in order, and repeated only
with the redelivered flag. At the end the demo runs in overlays/kind, without TLS. The result goes
to build/containers.json, and with `--page` to docs/reference/containers.md.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import shutil
import ssl
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.conditions import until
from tools.containers.container_cluster import START_S, ContainerCluster
from tools.containers.docker import DockerFailed, Network, docker, missing, network
from tools.containers.page import page
from tools.containers.pods import K8S, REPO, Pod, jobs, pods, render
from tools.containers.rejected_callers import SECRETS_FOLDER, refuse
from tools.containers.secrets import FOREIGN_SECRET, Secrets
from tools.containers.traffic_report import TrafficReport

SERVICES = ("storage", "offsets", "lockmgr", "nameserver", "etcd")
RECOVER_S, END_S = 180.0, 300.0
RATE = 200


async def _lacking(tag: str) -> str:
    """Return what is missing for a run; empty if nothing is."""
    for program, purpose in (("kubectl", "render the manifests"), ("openssl", "make certificates")):
        if shutil.which(program) is None:
            return f"there is no {program} to {purpose}"
    if why := await missing():
        return why
    for name in ("services", "demo", "etcd"):
        try:
            await docker("image", "inspect", f"batonmq/{name}:{tag}")
        except DockerFailed:
            return f"there is no image batonmq/{name}:{tag}; make images WITH_ETCD=1"
    return ""


async def _inject(
    cluster: ContainerCluster,
    traffic: TrafficReport,
    pod: Pod,
    name: str,
    inject: Callable[[Pod], Awaitable[None]],
) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await inject(pod)
    over_s = loop.time()
    await cluster.answers(pod, "readiness", RECOVER_S)
    ready_s = loop.time()
    await traffic.flows(RATE * 3, RECOVER_S)
    result = {
        "service": pod.service,
        "pod": pod.name,
        "fault": name,
        "lasted_s": round(over_s - began_s, 1),
        "ready_after_s": round(ready_s - over_s, 1),
        "flows_after_s": round(loop.time() - over_s, 1),
        "sent_stalled_s": traffic.stalled_s("sent", began_s),
        "handled_stalled_s": traffic.stalled_s("handled", began_s),
    }
    print(json.dumps(result), flush=True)
    return result


def _scene(net: Network, overlay: str, jobs_folder: str) -> ContainerCluster:
    members, clients = pods(render(K8S / "overlays" / overlay)), jobs(render(K8S / jobs_folder))
    asks = clients.get("grants", clients["demo"])
    secret = ("tls-demo", "tls-nobody", FOREIGN_SECRET, "etcd-client") if asks.secrets else ()
    shown = {f"{SECRETS_FOLDER}/{name}": name for name in secret}
    return ContainerCluster(net, members, clients, replace(asks, secrets={**asks.secrets, **shown}))


async def _play(options: argparse.Namespace, secrets: Secrets) -> dict[str, Any]:
    async with network(options.network, options.tag, secrets.mounted) as net:
        cluster = _scene(net, "kind-secure", "jobs-secure")
        report: dict[str, Any] = {
            "containers": len(cluster.members),
            "start_s": await cluster.start(),
        }
        print(json.dumps(report), flush=True)
        report["status"] = await cluster.baton("cluster", "status")
        await cluster.finish("grants")
        report["grants"] = await cluster.baton("access", "list")
        report["demo"] = await cluster.play("demo")
        print(json.dumps(report["demo"]), flush=True)
        report |= await _with_faults(cluster, options.services, secrets)
    async with network(options.network, options.tag, secrets.mounted) as net:
        cluster = _scene(net, "kind", "jobs")
        report["insecure"] = {"start_s": await cluster.start(), "demo": await cluster.play("demo")}
        print(json.dumps(report["insecure"]), flush=True)
    return report


async def _with_faults(
    cluster: ContainerCluster, services: list[str], secrets: Secrets
) -> dict[str, Any]:
    """Send traffic and inject faults; return the results."""
    report: dict[str, Any] = {"faults": []}
    pod = cluster.jobs["traffic"]
    words = ("--rate", str(RATE), "--repeats")
    process = await cluster.net.attached(replace(pod, command=(*pod.command, *words)))
    traffic = TrafficReport(process)
    injections = {"kill": cluster.kill, "pause": cluster.pause, "disconnect": cluster.cut}
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(traffic.follow())
        await traffic.flows(RATE * 3, START_S)
        for number, service in enumerate(services):
            if number == len(services) // 2:
                report["rejected_callers"] = await refuse(cluster)
                report["renewal"] = await _renew(cluster, traffic, secrets)
                print(json.dumps([report["rejected_callers"], report["renewal"]]), flush=True)
            pod = next(pod for pod in cluster.members if pod.service == service)
            for name, inject in injections.items():
                report["faults"].append(await _inject(cluster, traffic, pod, name, inject))
        await docker("kill", "--signal", "TERM", cluster.net.container("traffic"))
        async with asyncio.timeout(END_S):
            await process.wait()
    report["traffic"] = traffic.verdict
    return report


async def _renew(
    cluster: ContainerCluster, traffic: TrafficReport, secrets: Secrets
) -> dict[str, Any]:
    """Replace every certificate and key; return the time until all pods use the new ones.

    Raises:
        TimeoutError: A pod still uses its old certificate.
    """
    loop = asyncio.get_running_loop()
    await asyncio.to_thread(secrets.make)
    began_s = loop.time()
    for pod in cluster.members:
        (secret,) = (name for name in pod.secrets.values() if name != "etcd-client")
        address, secret = _address(pod)
        wanted = _digest(secrets.file(secret, "tls.crt"))

        async def shown(address: str = address, secret: str = secret, wanted: str = wanted) -> bool:
            return (await cluster.shake_hands(address, secret)).out == wanted

        await until(shown, RECOVER_S)
    shown_s = loop.time()
    await traffic.flows(RATE * 3, RECOVER_S)
    return {
        "pods": len(cluster.members),
        "shown_after_s": round(shown_s - began_s, 1),
        "sent_stalled_s": traffic.stalled_s("sent", began_s),
        "handled_stalled_s": traffic.stalled_s("handled", began_s),
    }


def _address(pod: Pod) -> tuple[str, str]:
    """Return the address of a pod and the Secret of a permitted client."""
    if pod.service == "etcd":
        return f"{pod.names[0]}:2379", f"{SECRETS_FOLDER}/etcd-client"
    return pod.env[f"BATON_{pod.service.upper()}_ADVERTISE_ADDRESS"], f"{SECRETS_FOLDER}/tls"


def _digest(path: Path) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(path.read_text())).hexdigest()


def main() -> int:
    """Read the command line, run and report; return the exit status."""
    parser = argparse.ArgumentParser(prog="tools.containers", description=__doc__)
    parser.add_argument("--tag", default="0.1.0", help="tag of the images")
    parser.add_argument("--network", default="baton-e2e", help="name of the network that is made")
    parser.add_argument("--services", nargs="+", default=SERVICES, choices=SERVICES)
    parser.add_argument("--page", action="store_true", help="write docs/reference/containers.md")
    options = parser.parse_args()
    if why := asyncio.run(_lacking(options.tag)):
        print(f"e2e-containers skipped: {why}")
        return 0
    with tempfile.TemporaryDirectory(prefix="baton-secrets-") as folder:
        secrets = Secrets(Path(folder))
        secrets.make()
        report = asyncio.run(_play(options, secrets))
    path = REPO / "build" / "containers.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    if options.page:
        (REPO / "docs" / "reference" / "containers.md").write_text(page(report))
    good = bool(
        report["demo"]["ok"]
        and report["traffic"].get("ok")
        and report["insecure"]["demo"]["ok"]
        and all(one["refused"] for one in report["rejected_callers"])
    )
    print(json.dumps(report["traffic"]))
    print("OK: nothing lost, no unflagged duplicate." if good else "FAILED: see above.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
