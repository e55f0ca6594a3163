"""Goal: credentials are read completely, fit together, and are never shown.

Method: files of a test authority, replaced in every order.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from batonmq._common.secret import Secret
from batonmq._connection.security import CredentialFiles, Security, from_json, to_json
from batonmq.errors import InvalidArgument
from batonmq_server.local.certificates import CertificateAuthority, CertificateSubject

SECRET = "a-token-that-must-not-be-shown"


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path / "tls")


@pytest.fixture
def carol(authority: CertificateAuthority) -> Security:
    return authority.issue(CertificateSubject(name="carol"))


def text_of(path: str) -> str:
    return Path(path).read_text()


def test_new_certificate_is_used_once_its_key_is_there(
    authority: CertificateAuthority,
    carol: Security,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = CredentialFiles(carol)
    before = files.pems
    assert not files.renew()
    other = CertificateAuthority(tmp_path / "other")
    other.issue(CertificateSubject(name="carol"))
    (tmp_path / "other" / "carol.pem").replace(carol.cert_file)
    with caplog.at_level(logging.WARNING):
        assert not files.renew()
        assert not files.renew()
    assert files.pems is before
    (logged,) = caplog.messages
    assert f"not usable yet error={carol.cert_file}, {carol.key_file}: " in logged
    (tmp_path / "other" / "carol.key").replace(carol.key_file)
    assert files.renew()
    assert files.pems.cert == Path(carol.cert_file).read_bytes() != before.cert


def test_rewritten_file_with_the_same_content_changes_nothing(carol: Security) -> None:
    files = CredentialFiles(carol)
    before = files.pems
    os.utime(carol.cert_file)
    assert not files.renew()
    assert files.pems is before


def test_swapped_links_are_followed(
    authority: CertificateAuthority, carol: Security, tmp_path: Path
) -> None:
    """Kubernetes mounts the files of a Secret behind a link to a folder."""
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        authority.issue(CertificateSubject(name="carol"))
        for name in ("carol.pem", "carol.key"):
            (authority.folder / name).replace(tmp_path / version / name)
    link = tmp_path / "data"
    link.symlink_to(tmp_path / "1")
    files = CredentialFiles(Security(cert_file=f"{link}/carol.pem", key_file=f"{link}/carol.key"))
    swapped = tmp_path / "new"
    swapped.symlink_to(tmp_path / "2")
    swapped.replace(link)
    assert files.renew()
    assert files.pems.cert == (tmp_path / "2" / "carol.pem").read_bytes()


def test_changed_token_is_read_without_new_certificates(carol: Security, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    files = CredentialFiles(replace(carol, token_file=str(file)))
    assert files.token == "first"
    file.write_text("second\n")
    assert not files.renew(), "a token needs no new connection"
    assert files.token == "second"


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "ümlaut", "x" * 20_000])
def test_invalid_token_is_rejected_without_being_shown(
    carol: Security, tmp_path: Path, token: str
) -> None:
    file = tmp_path / "token"
    file.write_text(token)
    for security in (
        replace(carol, token_file=str(file)),
        replace(carol, token=Secret(token)),
    ):
        with pytest.raises(InvalidArgument) as refused:
            CredentialFiles(security)
        assert not token or token not in str(refused.value)


def spoil_key(carol: Security) -> str:
    Path(carol.key_file).write_text("no key")
    return carol.key_file


def remove_authority(carol: Security) -> str:
    Path(carol.ca_file).unlink()
    return carol.ca_file


def empty_authority(carol: Security) -> str:
    Path(carol.ca_file).write_text("")
    return carol.ca_file


@pytest.mark.parametrize("spoil", [spoil_key, remove_authority, empty_authority])
def test_unusable_file_is_named(carol: Security, spoil: Callable[[Security], str]) -> None:
    path = spoil(carol)
    with pytest.raises(InvalidArgument) as refused:
        CredentialFiles(carol)
    assert path in refused.value.message
    assert "a certificate and its own key" in refused.value.remedy


def test_missing_token_file_is_named_with_a_remedy_for_tokens(tmp_path: Path) -> None:
    missing = str(tmp_path / "token")
    with pytest.raises(InvalidArgument) as refused:
        CredentialFiles(Security(token_file=missing))
    assert missing in refused.value.message
    assert "nothing but the token" in refused.value.remedy


def test_certificate_without_key_and_two_tokens_are_rejected() -> None:
    with pytest.raises(InvalidArgument, match="key_file is missing"):
        Security(cert_file="carol.pem")
    with pytest.raises(InvalidArgument, match="both token and token_file"):
        Security(token=Secret(SECRET), token_file="token")


def test_token_and_key_are_not_shown_and_survive_serialization(carol: Security) -> None:
    security = replace(carol, token=Secret(SECRET))
    shown = f"{security!r} {security} {CredentialFiles(security).pems!r}"
    assert SECRET not in shown
    assert "PRIVATE KEY" not in shown
    assert from_json(to_json(security)) == security
    assert pickle.loads(pickle.dumps(security)) == security


def test_only_the_owner_may_read_keys(authority: CertificateAuthority, carol: Security) -> None:
    for path in (carol.key_file, authority.folder / "ca.key"):
        assert Path(path).stat().st_mode & 0o077 == 0
    assert "PRIVATE KEY" not in text_of(carol.cert_file)
