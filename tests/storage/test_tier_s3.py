"""Goal: segments go to S3 and are read back, and none is lost while S3 fails.

Method: a whole node over gRPC, and the S3 server of moto in this process, on a port of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

from batonmq.errors import DataLoss
from tests.storage.replicas import BROKER
from tests.storage.running_node import running_node
from tests.storage.test_tiers import COUNT, body, fill, moved, pulled, tier
from tests.support.conditions import until

pytestmark = pytest.mark.timeout(240)

BUCKET = "messages"


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start an S3 server, and name it in the environment as users do."""
    S3FileSystem.clear_instance_cache()  # an earlier test had another port
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield f"http://{host}:{port}"
    finally:
        server.stop()


async def test_segments_go_to_s3_and_come_back(
    etcd_endpoint: str, tmp_path: Path, endpoint: str
) -> None:
    bucket = boto3.resource("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)
    expected = [body(number) for number in range(COUNT)]
    settings = tier(tmp_path) | {"tier_url": f"s3://{BUCKET}/baton"}
    async with running_node(etcd_endpoint, tmp_path / "data", **settings) as node:
        await fill(node.append)
        await until(lambda: moved(tmp_path / "data") == 9, 60)
        cluster = node.settings.cluster
        names = [one.key for one in bucket.objects.all()]
        folder = f"baton/{cluster}/{BROKER}"
        assert sum(name.startswith(f"{folder}/manifests/") for name in names) == 9
        assert await pulled(node) == expected
    parts = [name for name in names if name.startswith(f"{folder}/parts/")]
    content = bucket.Object(parts[0]).get()["Body"].read()
    # A new life of the node has nothing in its cache.
    async with running_node(etcd_endpoint, tmp_path / "data", cluster=cluster, **settings) as node:
        bucket.Object(parts[0]).put(Body=content[:5_000] + b"!" + content[5_001:])
        with pytest.raises(DataLoss, match="of the store is damaged: block 0"):
            await node.pull()
        bucket.Object(parts[0]).delete()
        with pytest.raises(DataLoss, match="of the store is missing"):
            await node.pull()
        bucket.Object(parts[0]).put(Body=content)
        assert await pulled(node) == expected


@pytest.mark.long
async def test_segments_stay_local_while_s3_does_not_answer(
    etcd_endpoint: str, tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint.replace("http:", "https:"))
    settings = tier(tmp_path) | {"tier_url": f"s3://{BUCKET}/baton"}
    expected = [body(number) for number in range(COUNT)]
    async with running_node(etcd_endpoint, tmp_path / "data", **settings) as node:
        await fill(node.append)
        sample = node.runtime.registry.get_sample_value
        await until(lambda: bool(sample("baton_storage_tier_failures_total", {"work": "list"})), 60)
        assert moved(tmp_path / "data") == 0
        assert await pulled(node) == expected
