"""A diagnostics bundle: the state of a cluster as files, for remote support.

The collection only reads. A failed call is noted in `problems.txt`, and the collection continues.
The bundle has no bodies, keys and properties of messages; values that look like secrets are masked.
"""

from __future__ import annotations

import asyncio
import json
import platform
import re
from collections.abc import Callable, Collection, Coroutine
from dataclasses import asdict, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from baton.storage.v1 import storage_service_pb2 as storage_pb
from batonmq._common import timeouts
from batonmq._common.clock import Clock
from batonmq._common.health import ask_health
from batonmq._connection.security import Security
from batonmq.admin.admin import Admin
from batonmq.admin.group_reports import QueueDiagnosis
from batonmq.admin.reports import ClusterNodes, Node
from batonmq.admin.resets import Resets
from batonmq.errors import BatonError

LOG_BYTES = 256 * 1024
"""Bytes from the end of each log file."""
_PACKAGES = ("batonmq", "grpcio", "protobuf", "numpy", "pydantic", "lmdb")
_AT_ONCE = 8
_TIMEOUT_S = 3.0
_WHOLE_TIMEOUT_S = 60.0
"""Timeout of the whole collection; calls to a service that hangs time out one by one."""
_SCRAPE_BYTES_MAX = 32 * 1024 * 1024
_SECRET_KEY = re.compile(r"passw|passphrase|secret|credential|api_?key|private_?key", re.I)
_SECRET_LINE = re.compile(r"(?i)((?:passw\w*|secret\w*|credential\w*|api_?key)\W{0,3}[=:]\s*)\S+")
_USER_INFO = re.compile(r"(://)[^/@\s]+@")
_BLACK = "[removed]"
Value = TypeVar("Value")


class Diagnostics:
    """Collects the files of the bundle.

    Args:
        on_file: Called after each file, with the number of files so far.
        security: TLS and credentials; None for a connection without TLS.

    Attributes:
        files: Content of each file, by name.
        problems: One line for each failed call, with the reason.
    """

    def __init__(
        self,
        nameserver: str,
        on_file: Callable[[int], None] = lambda _: None,
        *,
        security: Security | None = None,
    ) -> None:
        self._nameserver, self._on_file, self._security = nameserver, on_file, security
        self._room = asyncio.Semaphore(_AT_ONCE)
        self.files: dict[str, bytes] = {}
        self.problems: list[str] = []

    async def collect(self) -> None:
        """Collect the state of the cluster, for at most a minute."""
        self.add_json("about.json", self._about())
        try:
            async with (
                timeouts.timeout(_WHOLE_TIMEOUT_S),
                Admin(self._nameserver, timeout_s=_TIMEOUT_S, security=self._security) as admin,
            ):
                cluster = await self._tried("cluster", admin.cluster())
                if cluster is not None:
                    await self._cluster(admin, cluster)
        except TimeoutError:
            self.problems.append(
                f"the collection timed out after {_WHOLE_TIMEOUT_S:g} s: files are missing"
            )
        self.add_text("problems.txt", "".join(f"{problem}\n" for problem in self.problems))

    def add_json(self, name: str, value: object) -> None:
        """Add a JSON file with plain values and dataclasses."""
        plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        self.add_text(name, json.dumps(without_secrets(plain), indent=2, default=str) + "\n")

    def add_text(self, name: str, text: str) -> None:
        """Add a text file."""
        self.files[name] = _USER_INFO.sub(rf"\1{_BLACK}@", text).encode()
        self._on_file(len(self.files))

    def add_folder(self, folder: Path) -> None:
        """Add the ends of logs and the recovery reports of a cluster with its files in `folder`."""
        paths = [*folder.glob("logs/*.log"), *folder.glob("*/recovery.json")]
        if not paths:
            self.problems.append(f"{folder}: no logs and no recovery report")
        for path in sorted(paths):
            try:
                with path.open("rb") as file:
                    size = file.seek(0, 2)
                    file.seek(max(0, size - LOG_BYTES))
                    text = file.read().decode(errors="backslashreplace")
            except OSError as error:
                self.problems.append(f"{path}: {error}")
                continue
            self.add_text(
                f"local/{path.parent.name}/{path.name}", _SECRET_LINE.sub(rf"\1{_BLACK}", text)
            )

    def _about(self) -> dict[str, object]:
        return {
            "unix_ms": Clock().unix_ms(),
            "nameserver": self._nameserver,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: _version(name) for name in _PACKAGES},
        }

    async def _tried(self, name: str, call: Coroutine[Any, Any, Value]) -> Value | None:
        """Return the result; on failure note the problem and return None."""
        async with self._room:
            try:
                return await call
            except BatonError as error:
                self.problems.append(f"{name}: {error.reason}: {error.message}")
            except (OSError, EOFError, TimeoutError) as error:
                self.problems.append(f"{name}: {type(error).__name__} {error}".rstrip())
            return None

    async def _cluster(self, admin: Admin, cluster: ClusterNodes) -> None:
        self.add_json("cluster.json", cluster)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._health(admin, cluster.nodes))
            for node in cluster.nodes:
                tasks.create_task(self._metrics(node))
            for broker in {n.replica_set for n in cluster.nodes if n.service == "storage"}:
                tasks.create_task(self._broker(admin, broker))
            tasks.create_task(self._locks(admin))
            tasks.create_task(self._topics(admin))
            tasks.create_task(self._groups(admin))

    async def _health(self, admin: Admin, nodes: Collection[Node]) -> None:
        health: dict[str, object] = {}
        for node in nodes:
            async with admin.directory.connect(node.address) as channel:
                status = await ask_health(channel, timeout_s=_TIMEOUT_S)
            health[f"{node.service}/{node.node_id}"] = status
        self.add_json("health.json", health)

    async def _metrics(self, node: Node) -> None:
        if not node.metrics_address:
            return
        name = f"{node.service}-{node.node_id}"
        text = await self._tried(f"metrics of {name}", scrape(node.metrics_address))
        if text is not None:
            self.add_text(f"metrics/{name}.txt", text)

    async def _broker(self, admin: Admin, broker: str) -> None:
        description = await self._tried(f"broker {broker}", describe_broker(admin, broker))
        if description is not None:
            self.add_json(f"brokers/{broker}.json", description)

    async def _locks(self, admin: Admin) -> None:
        locks = await self._tried("locks", admin.list_locks())
        if locks is not None:
            self.add_json("locks.json", [asdict(lock) for lock in locks])

    async def _topics(self, admin: Admin) -> None:
        topics = await self._tried("topics", admin.list_topics()) or ()
        self.add_json("topics.json", [asdict(topic) for topic in topics])
        async with asyncio.TaskGroup() as tasks:
            for topic in topics:
                tasks.create_task(self._topic(admin, topic.name))

    async def _topic(self, admin: Admin, name: str) -> None:
        detail = await self._tried(f"topic {name}", admin.describe_topic(name))
        if detail is not None:
            self.problems += (f"topic {name}: {p}" for p in detail.problems)
            self.add_json(f"topics/{name}.json", detail)

    async def _groups(self, admin: Admin) -> None:
        groups = await self._tried("groups", admin.list_groups()) or ()
        self.add_json("groups.json", [asdict(group) for group in groups])
        async with asyncio.TaskGroup() as tasks:
            for group in groups:
                tasks.create_task(self._group(admin, group.name))

    async def _group(self, admin: Admin, name: str) -> None:
        progress = await self._tried(f"group {name}", admin.group_progress(name))
        if progress is not None:
            self.problems += (f"group {name}: {p}" for p in progress.problems)
            refused = [
                {"client_id": r.client_id, "host": r.host, "error": f"{r.error.reason}: {r.error}"}
                for r in progress.refused
            ]
            queues = [asdict(queue) for queue in progress.queues]
            report = {"group": asdict(progress.group), "queues": queues, "refused": refused}
            self.add_json(f"groups/{name}.json", report)
        if progress is None or any(queue.lag != 0 for queue in progress.queues):
            stuck = await self._tried(f"why-stuck {name}", admin.why_stuck(name))
            if stuck is not None:
                self.add_json(f"groups/{name}.why-stuck.json", [_without_key(d) for d in stuck])
        resets = await self._tried(f"resets of {name}", Resets(admin).history(name))
        if resets:
            self.add_json(f"groups/{name}.resets.json", [asdict(reset) for reset in resets])


async def describe_broker(admin: Admin, broker: str) -> dict[str, Any]:
    """Return the description of a storage node, with the field names of `DescribeResponse`.

    Raises:
        BatonError: The node does not answer.
    """

    async def ask(limit_s: float) -> storage_pb.DescribeResponse:
        stub = await admin.directory.storage(broker)
        return await stub.Describe(storage_pb.DescribeRequest(), timeout=limit_s)

    answer = await admin.ask(ask)
    fields: dict[str, Any] = {
        field.name: getattr(answer, field.name) for field in answer.DESCRIPTOR.fields
    }
    state = storage_pb.DiskState.Name(answer.disk_state)
    return fields | {"disk_state": state.removeprefix("DISK_STATE_").lower()}


async def scrape(address: str) -> str:
    """Return the metrics page of a node at `address`, host:port.

    Raises:
        OSError, EOFError, TimeoutError: The page can't be read.
    """
    async with timeouts.timeout(_TIMEOUT_S):
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=_SCRAPE_BYTES_MAX)
        try:
            writer.write(f"GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
            status = await reader.readline()
            if b" 200 " not in status:
                raise OSError(f"{address} answers {status.decode(errors='replace').strip()!r}")
            await reader.readuntil(b"\r\n\r\n")
            return (await reader.read(-1)).decode()
        finally:
            writer.close()


def without_secrets(value: Any) -> Any:
    """Return `value` with masked values for keys that name a secret."""
    if isinstance(value, dict):
        return {
            key: _BLACK if _SECRET_KEY.search(str(key)) and item else without_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return value


def _without_key(diagnosis: QueueDiagnosis) -> dict[str, Any]:
    """Return a diagnosis without the ordering key, which is data of the application."""
    fields, key = asdict(diagnosis), diagnosis.evidence.get("running_ordering_key")
    if key:
        fields["message"] = diagnosis.message.replace(repr(key), _BLACK)
        fields["evidence"] = {**diagnosis.evidence, "running_ordering_key": _BLACK}
    return fields


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
