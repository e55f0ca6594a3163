"""A cluster of containers: commands, probes, jobs and faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batonmq._common.health import SERVING
from tests.support.conditions import until
from tools.containers.docker import DockerFailed, DockerResult, Network, docker, run
from tools.containers.pods import Pod

PAUSE_S = 40.0
RESTART_S = 1.0
START_S = 90.0
NAMESERVER = "nameserver:9876"
_PROBE = """
import asyncio, sys
from batonmq._connection.channels import connect
from batonmq._common.health import ask_health
async def main():
    async with connect(sys.argv[1]) as channel:
        print(await ask_health(channel, service=sys.argv[2]))
asyncio.run(main())
"""
_SHAKE_HANDS = r"""
import hashlib, socket, ssl, sys
host, port, ca, cert, key = sys.argv[1:]
context = ssl.create_default_context(cafile=ca)
context.load_cert_chain(cert, key)
context.set_alpn_protocols(["h2"])
with socket.create_connection((host, int(port)), timeout=10) as raw:
    with context.wrap_socket(raw, server_hostname=host) as tls:
        print(hashlib.sha256(tls.getpeercert(binary_form=True)).hexdigest())
        tls.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        assert tls.recv(1), "the server closed the connection"
"""


class ContainerCluster:
    """A cluster of containers.

    Args:
        members: Its pods.
        jobs: Pods of clients, by name; `asks` is the pod of the operator.
    """

    def __init__(self, net: Network, members: list[Pod], jobs: dict[str, Pod], asks: Pod) -> None:
        self.net, self.members, self.jobs = net, members, jobs
        env = {**asks.env, "BATON_NAMESERVER": NAMESERVER}
        self._asks = replace(asks, name="prober", env=env, command=("sleep", "infinity"))

    async def start(self) -> float:
        """Start all pods at once; return the seconds until all are ready."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for pod in (*self.members, self._asks):
                tasks.create_task(self.net.run(pod))
        for pod in self.members:
            await self.answers(pod, "readiness", START_S)
        return round(loop.time() - began_s, 1)

    async def ask(self, *words: str, env: Mapping[str, str] | None = None) -> DockerResult:
        """Run a command in a new container of the operator, with additional variables."""
        more = [word for key, value in (env or {}).items() for word in ("--env", f"{key}={value}")]
        return await run("exec", *more, self.net.container("prober"), *words)

    async def baton(self, *words: str) -> str:
        """Run a baton command as the operator; return its output."""
        result = await self.ask("baton", *words)
        if result.status:
            raise DockerFailed(f"baton {' '.join(words)}: {result.error}")
        return result.out

    async def health(self, pod: Pod, kind: str) -> str:
        """Run a probe of the manifest once."""
        port, service = pod.probes[kind]
        result = await self.ask("python", "-c", _PROBE, f"{pod.names[0]}:{port}", service)
        return result.out

    async def answers(self, pod: Pod, kind: str, timeout_s: float) -> None:
        """Wait until a probe succeeds; return at once for a pod without this probe.

        Raises:
            TimeoutError: The probe does not succeed.
        """
        if kind not in pod.probes:
            return

        async def serves() -> bool:
            return await self.health(pod, kind) == SERVING

        await until(serves, timeout_s)

    async def shake_hands(self, address: str, secret: str, trusting: str = "") -> DockerResult:
        """Connect over TLS; the output is the digest of the server certificate.

        Args:
            secret: Folder with `tls.crt` and `tls.key` of the client.
            trusting: Folder with `ca.crt`; the same by default.
        """
        files = [f"{trusting or secret}/ca.crt", f"{secret}/tls.crt", f"{secret}/tls.key"]
        return await self.ask("python", "-c", _SHAKE_HANDS, *address.rsplit(":", 1), *files)

    async def play(self, job: str) -> dict[str, Any]:
        """Run a job to its end; return its counts and whether it succeeded."""
        pod = self.jobs[job]
        command = ("baton", "--format", "json", *pod.command[1:])
        process = await self.net.attached(replace(pod, command=command))
        out, _ = await process.communicate()
        return {**json.loads(out), "ok": process.returncode == 0}

    async def finish(self, job: str) -> None:
        """Run a job to its end.

        Raises:
            DockerFailed: The exit status of the job is not 0.
        """
        process = await self.net.attached(self.jobs[job])
        out, _ = await process.communicate()
        if process.returncode:
            raise DockerFailed(f"job {job}: {out.decode()}")

    async def kill(self, pod: Pod) -> None:
        """Kill a container as `kill -9` does, and start it again."""
        await docker("kill", self.net.container(pod.name))
        await asyncio.sleep(RESTART_S)
        await docker("start", self.net.container(pod.name))

    async def pause(self, pod: Pod) -> None:
        """Pause a container."""
        await docker("pause", self.net.container(pod.name))
        await asyncio.sleep(PAUSE_S)
        await docker("unpause", self.net.container(pod.name))

    async def cut(self, pod: Pod) -> None:
        """Disconnect a running container from the network."""
        await self.net.cut(pod.name)
        await asyncio.sleep(PAUSE_S)
        await self.net.mend(pod.name)
