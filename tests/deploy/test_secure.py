"""Goal: overlays with TLS and access on have every certificate they name, good for what it is for.

Method: the certificates of `make-ca.sh`, held against the rendered manifests; the names of
settings and variables against what services and `baton` know; a script that fails on its way.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from batonmq.cli import app
from batonmq.common.config import load
from tests.containers.pods import K8S, REPO, Pod, Resource, jobs, pods
from tests.containers.secrets import Secrets
from tests.deploy.manifests import render
from tests.deploy.test_manifests import SETTINGS, kubectl

SCRIPT = REPO / "deploy" / "kubernetes" / "make-ca.sh"
openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="NO OPENSSL")
SECURE = ("kind-secure", "minikube-secure")


def overlay(name: str) -> list[Resource]:
    return render(K8S / "overlays" / name)


def clients() -> dict[str, Pod]:
    return jobs(render(K8S / "jobs-secure"))


def make_ca(folder: Path, *clients: str, **env: str) -> subprocess.CompletedProcess[str]:
    words = ["env", *(f"{name}={value}" for name, value in env.items()), str(SCRIPT), str(folder)]
    return subprocess.run([*words, *clients], check=False, capture_output=True, text=True)


def names(cert: Path) -> set[str]:
    """Subject alternative names, such as `DNS:localhost`."""
    words = ["openssl", "x509", "-in", str(cert), "-noout", "-ext", "subjectAltName"]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return {name.strip() for name in said.splitlines()[1].split(",")}


def covers(name: str, host: str) -> bool:
    label, _, rest = host.partition(".")
    return name == f"DNS:{host}" or (label != "*" and name == f"DNS:*.{rest}" and "." in rest)


@kubectl
@openssl
@pytest.mark.parametrize("name", SECURE)
def test_every_secret_is_made_and_good_for_the_names_its_pod_is_called_by(
    name: str, tmp_path: Path
) -> None:
    secrets = Secrets(tmp_path)
    secrets.make()
    found = pods(overlay(name))
    assert {pod.service for pod in found} == {*SETTINGS, "etcd"}
    for pod in found:
        for secret in pod.secrets.values():
            files = {path.name for path in (secrets.mounted / secret).iterdir()}
            assert {"ca.crt", "tls.crt", "tls.key"} <= files
        own = "etcd-server" if pod.service == "etcd" else f"tls-{pod.service}"
        assert own in pod.secrets.values()
        told = names(secrets.file(own, "tls.crt"))
        if pod.service == "etcd":
            called = {f"{pod.name}.etcd", f"{pod.name}.etcd.baton.svc"}
        else:
            advertised = pod.env[f"BATON_{pod.service.upper()}_ADVERTISE_ADDRESS"]
            called = {advertised.partition(":")[0], "localhost"}
            assert f"URI:service:{pod.service}" in told
        for host in called:
            assert any(covers(one, host) for one in told), host
    told = names(secrets.file("tls-nameserver", "tls.crt"))
    for host in ("nameserver", "nameserver.baton", "nameserver.baton.svc"):
        assert f"DNS:{host}" in told


@openssl
def test_no_certificate_of_a_client_or_service_is_good_for_etcd(tmp_path: Path) -> None:
    assert make_ca(tmp_path, "demo").returncode == 0
    for secret, good in (("tls-demo", False), ("tls-storage", False), ("etcd-client", True)):
        authority, cert = tmp_path / "etcd-ca.crt", tmp_path / secret / "tls.crt"
        words = ["openssl", "verify", "-CAfile", str(authority), str(cert)]
        said = subprocess.run(words, check=False, capture_output=True)
        assert (said.returncode == 0) is good


@kubectl
@pytest.mark.parametrize("name", SECURE)
def test_services_ask_who_calls_and_are_asked_by_etcd(name: str) -> None:
    for pod in pods(overlay(name)):
        if pod.service == "etcd":
            assert pod.env["ETCD_CLIENT_CERT_AUTH"] == pod.env["ETCD_PEER_CLIENT_CERT_AUTH"]
            urls = [word for word in pod.command if "-urls=" in word and "metrics" not in word]
            assert len(urls) == 4
            assert all("=https://" in word for word in urls)
            continue
        settings = load(SETTINGS[pod.service], f"BATON_{pod.service.upper()}", pod.env)
        assert settings.access
        assert settings.access_admins == "operator"
        assert settings.tls_require_client_cert
        assert settings.etcd_security is not None
        assert not settings.insecure_network


@kubectl
def test_jobs_say_how_to_use_tls_as_everybody_does() -> None:
    command: Any = get_command(app)
    known = {name for option in command.params for name in _names(option.envvar)}
    for name, secret in (("demo", "tls-demo"), ("traffic", "tls-demo"), ("grants", "tls-operator")):
        pod = clients()[name]
        assert pod.secrets == {"/etc/baton/tls": secret}
        told = {key: value for key, value in pod.env.items() if key.startswith("BATON_")}
        assert told.keys() <= known
        for variable, file in (("CA", "ca.crt"), ("CERT", "tls.crt"), ("KEY", "tls.key")):
            assert told[f"BATON_{variable}_FILE"] == f"/etc/baton/tls/{file}"


def _names(variables: str | list[str] | None) -> list[str]:
    return [variables] if isinstance(variables, str) else list(variables or ())


@openssl
def test_what_is_there_is_kept_and_renewed_when_asked(tmp_path: Path) -> None:
    assert make_ca(tmp_path).returncode == 0
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert make_ca(tmp_path, "billing").returncode == 0
    assert {path: path.read_bytes() for path in kept} == kept
    assert "URI:billing" in names(tmp_path / "tls-billing" / "tls.crt")
    assert make_ca(tmp_path, RENEW="1").returncode == 0
    for path, before in kept.items():
        assert (path.read_bytes() == before) is (path.stem in ("ca", "etcd-ca")), path


@openssl
def test_a_failure_on_the_way_leaves_no_half_certificate(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    folder, real = tmp_path / "tls", shutil.which("openssl")
    broken = programs / "openssl"
    # Signs as it should until it is the turn of offsets; then it begins its file, and fails.
    broken.write_text(
        f'#!/bin/sh\ncase "$*" in *tls-offsets*-out*tls.crt*) '
        f'for last; do :; done; : >"$last"; exit 1;; esac\nexec {real} "$@"\n'
    )
    broken.chmod(0o755)
    path = f"{programs}:/usr/local/bin:/usr/bin:/bin"
    assert make_ca(folder, PATH=path).returncode != 0
    assert (folder / "tls-storage" / "tls.crt").exists()
    assert not (folder / "tls-offsets").exists()
    assert make_ca(folder).returncode == 0
    assert "URI:service:offsets" in names(folder / "tls-offsets" / "tls.crt")
