"""Pods from manifests, and the page of a run.

Goal: a container gets what the kubelet would give it; the page says what the report says.
Method: a manifest written here, and a report; no Docker is needed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from tools.containers.page import page
from tools.containers.pods import jobs, pods
from tools.containers.secrets import Secrets
from tools.containers.traffic_report import TrafficCount, TrafficReport

MANIFEST = """
kind: ConfigMap
metadata: {name: offsets-x1}
data: {BATON_OFFSETS_PORT: "10912"}
---
kind: Service
metadata: {name: offsets}
spec: {selector: {app.kubernetes.io/name: offsets}}
---
kind: Service
metadata: {name: front}
spec: {selector: {app.kubernetes.io/name: offsets}}
---
kind: Service
metadata: {name: other}
spec: {selector: {app.kubernetes.io/name: storage}}
---
kind: StatefulSet
metadata: {name: offsets, namespace: baton}
spec:
  serviceName: offsets
  replicas: 2
  template:
    metadata: {labels: {app.kubernetes.io/name: offsets}}
    spec:
      terminationGracePeriodSeconds: 60
      securityContext: {runAsUser: 10001, runAsGroup: 10001}
      containers:
        - image: batonmq/services:1
          command: [python, -m, batonmq_server.offsets, $(NAME), $(UNSET)]
          envFrom: [{configMapRef: {name: offsets-x1}}]
          env:
            - {name: NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
            - {name: AT, value: "$(NAME).offsets:$(BATON_OFFSETS_PORT)"}
            - {name: OWN, valueFrom: {configMapKeyRef: {name: offsets-x1, key: BATON_OFFSETS_PORT}}}
          readinessProbe: {grpc: {port: 9465, service: ready}}
          livenessProbe: {httpGet: {path: /, port: 1}}
          resources: {limits: {memory: 512Mi}}
          volumeMounts:
            - {name: data, mountPath: /kept}
            - {name: tmp, mountPath: /tmp}
            - {name: tls, mountPath: /tls}
      volumes: [{name: tmp, emptyDir: {}}, {name: tls, secret: {secretName: tls-offsets}}]
  volumeClaimTemplates: [{metadata: {name: data}}]
---
kind: Job
metadata: {name: once, namespace: baton}
spec:
  template:
    metadata: {labels: {app.kubernetes.io/name: offsets}}
    spec:
      terminationGracePeriodSeconds: 60
      securityContext: {runAsUser: 10001, runAsGroup: 10001}
      containers:
        - image: batonmq/demo:1
          command: [baton, demo]
          resources: {limits: {memory: 1Gi}}
          volumeMounts: [{name: tls, mountPath: /tls}]
      volumes: [{name: tls, secret: {secretName: tls-demo}}]
"""
REPORT = {
    "containers": 7,
    "start_s": 5.1,
    "status": "SERVICE  NODE  ",
    "grants": "IDENTITY  ROLE",
    "demo": {
        "published": 336776, "consumed": 336776, "lost": 0, "duplicated": 0, "misordered": 0,
        "handovers": 31, "ok": True,
    },
    "faults": [
        {
            "pod": "storage-a-0", "fault": "kill", "ready_after_s": 2.5, "flows_after_s": 4.0,
            "sent_stalled_s": 3.1, "handled_stalled_s": 3.2,
        }
    ],
    "traffic": {
        "sent": 1000, "unsure": 0, "consumed": 999, "lost": 1, "duplicated": 0, "unflagged": 0,
        "misordered": 0, "foreign": 0, "ok": False,
    },
    "renewal": {"pods": 7, "shown_after_s": 1.3, "sent_stalled_s": 1.1, "handled_stalled_s": 1.2},
    "rejected_callers": [
        {"caller": "without token", "command": "a | b", "error": "REASON: why", "rejected": True},
        {"caller": "accepted", "command": "c", "error": "", "rejected": False},
    ],
    "insecure": {
        "start_s": 5.0,
        "demo": {
            "published": 5, "consumed": 5, "lost": 0, "duplicated": 0, "misordered": 0,
            "handovers": 3, "ok": True,
        },
    },
}  # fmt: skip


def test_pod_has_the_values_of_its_manifest() -> None:
    first, second = pods(yaml.safe_load_all(MANIFEST))
    assert (first.name, second.name) == ("offsets-0", "offsets-1")
    assert second.env == {
        "BATON_OFFSETS_PORT": "10912",
        "NAME": "offsets-1",
        "AT": "offsets-1.offsets:10912",
        "OWN": "10912",
    }
    assert second.command == ("python", "-m", "batonmq_server.offsets", "offsets-1", "$(UNSET)")
    assert second.names == (
        "offsets-1.offsets", "offsets-1.offsets.baton", "offsets-1.offsets.baton.svc",
        "front", "front.baton", "front.baton.svc",
    )  # fmt: skip
    assert second.probes == {"readiness": (9465, "ready")}
    assert (second.volumes, second.scratch, second.user) == (("/kept",), ("/tmp",), "10001:10001")
    assert second.secrets == {"/tls": "tls-offsets"}


def test_job_has_one_pod_without_a_service_name() -> None:
    pods_by_job = jobs(yaml.safe_load_all(MANIFEST))
    assert pods_by_job.keys() == {"once"}
    pod = pods_by_job["once"]
    assert (pod.name, pod.command, pod.names) == ("once", ("baton", "demo"), ())
    assert pod.secrets == {"/tls": "tls-demo"}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="NO OPENSSL")
def test_files_of_a_secret_are_replaced_atomically(tmp_path: Path) -> None:
    secrets = Secrets(tmp_path)
    secrets.make()
    cert = secrets.file("tls-storage", "tls.crt")
    assert cert.is_symlink()
    assert cert.parent.joinpath("..data").is_symlink()
    before, place = cert.read_text(), cert.resolve()
    secrets.make()
    assert cert.read_text() != before
    assert not place.exists()
    assert (
        secrets.file("tls-storage", "ca.crt").read_text()
        == secrets.file("tls-demo", "ca.crt").read_text()
    )


def test_page_reports_lost_messages() -> None:
    text = page(REPORT)
    assert "| storage-a-0 | kill | 2.5 | 4.0 | 3.1 | 3.2 |" in text
    assert "| 1,000 | 0 | 999 | 1 | 0 | 0 | 0 | 0 |" in text
    assert "Verdict: **failed**" in text


def test_page_reports_admitted_callers_and_the_certificate_renewal_time() -> None:
    text = page(REPORT)
    assert "| without token | `a \\| b` | REASON: why |" in text
    assert "| accepted | `c` | **ACCEPTED** |" in text
    assert "After 1.3 s all 7 pods presented their new certificate" in text
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_longest_stall_counts_from_the_start_of_the_fault() -> None:
    handled = [10, 20, 20, 20, 30, 40]
    seconds = [TrafficCount(float(at), 100, count) for at, count in enumerate(handled)]
    traffic = TrafficReport(process=None, seconds=seconds)  # type: ignore[arg-type]
    assert traffic.stalled_s("handled", 1.0) == 3.0
    assert traffic.stalled_s("handled", 4.0) == 1.0
    assert traffic.stalled_s("sent", 2.0) == 3.0
