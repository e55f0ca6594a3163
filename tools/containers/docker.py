"""Runs docker commands; makes a private network with containers."""

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
    """A docker command has failed."""


class DockerResult(NamedTuple):
    """The exit status and the output of a command."""

    status: int
    out: str
    error: str


async def run(*words: str) -> DockerResult:
    """Run `docker ...`; return its result, also after a failure."""
    process = await asyncio.create_subprocess_exec(
        "docker", *words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    out, error = await process.communicate()
    assert process.returncode is not None
    return DockerResult(process.returncode, out.decode().strip(), error.decode().strip())


async def docker(*words: str) -> str:
    """Run `docker ...`; return its output.

    Raises:
        DockerFailed: The exit status is not 0.
    """
    result = await run(*words)
    if result.status:
        raise DockerFailed(f"docker {' '.join(words)}: {result.error}")
    return result.out


async def missing() -> str:
    """Return why Docker is not usable; empty if it is."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    try:
        await docker("info", "--format", "{{.ServerVersion}}")
    except DockerFailed as error:
        return str(error)
    return ""


class Network:
    """A private network and its containers, which have the names of their pods.

    Args:
        name: Name of the network, and prefix of all containers and volumes.
        tag: Tag of the images.
        secrets: Folder with a folder for each Secret.
    """

    def __init__(self, name: str, tag: str, secrets: Path) -> None:
        self.name, self._tag, self._secrets = name, tag, secrets
        self._pods: dict[str, Pod] = {}

    def container(self, pod: str) -> str:
        """Return the name of a pod's container."""
        return f"{self.name}-{pod}"

    async def run(self, pod: Pod) -> None:
        """Start a container with the restrictions of the manifest and a read-only root."""
        self._pods[pod.name] = pod
        await docker("run", "--detach", *self._words(pod))

    async def attached(self, pod: Pod) -> Process:
        """Start a container of a client; return the process with its output."""
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
        """Disconnect a container from the network."""
        await docker("network", "disconnect", self.name, self.container(pod))

    async def mend(self, pod: str) -> None:
        """Reconnect a container with its names; its address may change."""
        names = [word for name in self._pods[pod].names for word in ("--alias", name)]
        await docker("network", "connect", *names, self.name, self.container(pod))

    def _image(self, image: str) -> str:
        """Return the local image for an image of a manifest."""
        name = image.rpartition("/")[2].partition(":")[0]
        return f"batonmq/{name}:{self._tag}"


@asynccontextmanager
async def network(name: str, tag: str, secrets: Path) -> AsyncIterator[Network]:
    """Make an internal network; remove it with all its containers and volumes at the end."""
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
