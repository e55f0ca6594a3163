"""Goal: Kubernetes does not kill an etcd member without a quorum, and routes no client to it.

Method: one real member of three runs alone, and answers the probes of the manifest.
"""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from batonmq_server.local.etcd import find_etcd
from batonmq_server.local.ports import keep_ports
from tests.deploy.test_manifests import documents
from tests.support.conditions import until_now
from tools.containers.pods import K8S

MEMBERS = ("etcd-0", "etcd-1", "etcd-2")


@pytest.fixture
def single_member(tmp_path: Path) -> Iterator[str]:
    """Return the health address of one member of three that runs alone."""
    ports = keep_ports(tmp_path / "ports.json", ["client", "metrics", *MEMBERS])
    peers = {name: f"http://127.0.0.1:{ports[name]}" for name in MEMBERS}
    client, at = (f"http://127.0.0.1:{ports[name]}" for name in ("client", "metrics"))
    words = [
        str(find_etcd()),
        f"--name={MEMBERS[0]}",
        f"--data-dir={tmp_path / 'data'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peers[MEMBERS[0]]}",
        f"--initial-advertise-peer-urls={peers[MEMBERS[0]]}",
        f"--initial-cluster={','.join(f'{name}={url}' for name, url in peers.items())}",
        f"--listen-metrics-urls={at}",
    ]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            until_now(lambda: answer(f"{at}/metrics"))
            yield at
        finally:
            process.kill()
            process.wait()


def answer(url: str) -> int:
    """Return the HTTP status; 0 if no server answers."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=20) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_etcd_member_without_a_quorum_is_started_and_live_and_not_ready(single_member: str) -> None:
    (etcd,) = (
        one
        for one in documents(K8S / "components" / "etcd" / "etcd.yaml")
        if one["kind"] == "StatefulSet"
    )
    (container,) = etcd["spec"]["template"]["spec"]["containers"]
    statuses = {
        kind: answer(single_member + container[f"{kind}Probe"]["httpGet"]["path"])
        for kind in ("startup", "liveness", "readiness")
    }
    assert statuses == {"startup": 200, "liveness": 200, "readiness": 503}, json.dumps(statuses)
