"""Docker, as far as it is needed: its command line."""

from __future__ import annotations

import asyncio
import shutil
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from tools.containers.pods import Pod


class DockerFailed(Exception):
    """A command has failed."""


class DockerResult(NamedTuple):
    """How a command has ended, and what it has printed."""

    status: int
    out: str
    error: str


async def run(*words: str) -> DockerResult:
    """Run `docker ...` to its end, whatever that is."""
    process = await asyncio.create_subprocess_exec(
        "docker", *words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    out, error = await process.communicate()
    assert process.returncode is not None
    return DockerResult(process.returncode, out.decode().strip(), error.decode().strip())


async def docker(*words: str) -> str:
    """Run `docker ...`; what it prints.

    Raises:
        DockerFailed: it says no.
    """
    result = await run(*words)
    if result.status:
        raise DockerFailed(f"docker {' '.join(words)}: {result.error}")
    return result.out


async def missing() -> str:
    """Why there is no Docker to work with; empty if there is."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    try:
        await docker("info", "--format", "{{.ServerVersion}}")
    except DockerFailed as error:
        return str(error)
    return ""


class Network:
    """A private network and the containers on it, which are called as their pods.

    Args:
        name: Of the network; what is made begins with it.
        tag: Of the images.
        secrets: Has a folder for each Secret.
    """

    def __init__(self, name: str, tag: str, secrets: Path) -> None:
        self.name, self._tag, self._secrets = name, tag, secrets
        self._pods: dict[str, Pod] = {}

    def container(self, pod: str) -> str:
        """Name of a pod's container."""
        return f"{self.name}-{pod}"

    async def run(self, pod: Pod) -> None:
        """Start a container as the manifest wants it: restricted, without a root to write to."""
        self._pods[pod.name] = pod
        await docker("run", "--detach", *self._words(pod))

    async def attached(self, pod: Pod) -> Process:
        """Start one that nobody calls and that ends by itself; its output is the process's."""
        words = ("run", "--rm", *self._words(pod))
        return await asyncio.create_subprocess_exec("docker", *words, stdin=DEVNULL, stdout=PIPE)

    def _words(self, pod: Pod) -> list[str]:
        words = [
            "--name", self.container(pod.name), "--network", self.name,
            "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
            "--hostname", pod.name, "--user", pod.user, "--stop-timeout", str(pod.grace_s),
            "--memory", pod.memory.replace("Mi", "m").replace("Gi", "g"),
        ]  # fmt: skip
        words += [word for name in pod.names for word in ("--network-alias", name)]
        words += [word for key, value in pod.env.items() for word in ("--env", f"{key}={value}")]
        for path in pod.volumes:
            words += ["--volume", f"{self.container(pod.name)}:{path}"]
        for path, secret in pod.secrets.items():
            words += ["--volume", f"{self._secrets / secret}:{path}:ro"]
        for path in pod.scratch:
            words += ["--tmpfs", f"{path}:mode=1777"]
        return [*words, self._image(pod.image), *pod.command]

    async def cut(self, pod: str) -> None:
        """Take a container off the network."""
        await docker("network", "disconnect", self.name, self.container(pod))

    async def mend(self, pod: str) -> None:
        """Put it on again, under its names; its address may be another one."""
        names = [word for name in self._pods[pod].names for word in ("--alias", name)]
        await docker("network", "connect", *names, self.name, self.container(pod))

    def _image(self, image: str) -> str:
        """The local one of a manifest's image."""
        name = image.rpartition("/")[2].partition(":")[0]
        return f"batonmq/{name}:{self._tag}"


@asynccontextmanager
async def network(name: str, tag: str, secrets: Path) -> AsyncIterator[Network]:
    """A network that nobody outside is on; it is gone afterwards, with all that was made on it."""
    await docker("network", "create", "--internal", name)
    try:
        yield Network(name, tag, secrets)
    finally:
        named = ("--filter", f"name=^{name}-", "--quiet")
        containers = (await docker("ps", "--all", *named)).split()
        if containers:
            await docker("rm", "--force", "--volumes", *containers)
        volumes = (await docker("volume", "ls", *named)).split()
        if volumes:
            await docker("volume", "rm", *volumes)
        await docker("network", "rm", name)
