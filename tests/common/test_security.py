"""Goal: what proves who somebody is is read whole, goes together, and is never shown.

Method: files made by an authority of the test, replaced in every order.
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

SECRET = "a-token-that-nobody-shows"


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path / "tls")


@pytest.fixture
def carol(authority: CertificateAuthority) -> Security:
    return authority.issue(CertificateSubject(name="carol"))


def text_of(path: str) -> str:
    return Path(path).read_text()


def test_replaced_certificate_is_there_once_its_key_is(
    authority: CertificateAuthority,
    carol: Security,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    papers = CredentialFiles(carol)
    before = papers.pems
    assert not papers.renew()
    other = CertificateAuthority(tmp_path / "other")
    other.issue(CertificateSubject(name="carol"))
    (tmp_path / "other" / "carol.pem").replace(carol.cert_file)
    with caplog.at_level(logging.WARNING):
        assert not papers.renew()
        assert not papers.renew()
    assert papers.pems is before
    (told,) = caplog.messages
    assert f"not used yet error={carol.cert_file}, {carol.key_file}: " in told
    (tmp_path / "other" / "carol.key").replace(carol.key_file)
    assert papers.renew()
    assert papers.pems.cert == Path(carol.cert_file).read_bytes() != before.cert


def test_file_that_is_written_anew_with_the_same_content_changes_nothing(carol: Security) -> None:
    papers = CredentialFiles(carol)
    before = papers.pems
    os.utime(carol.cert_file)
    assert not papers.renew()
    assert papers.pems is before


def test_links_that_are_swapped_are_followed(
    authority: CertificateAuthority, carol: Security, tmp_path: Path
) -> None:
    """As a Secret of Kubernetes is mounted: files behind a link to a folder."""
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        authority.issue(CertificateSubject(name="carol"))
        for name in ("carol.pem", "carol.key"):
            (authority.folder / name).replace(tmp_path / version / name)
    link = tmp_path / "data"
    link.symlink_to(tmp_path / "1")
    papers = CredentialFiles(Security(cert_file=f"{link}/carol.pem", key_file=f"{link}/carol.key"))
    swapped = tmp_path / "new"
    swapped.symlink_to(tmp_path / "2")
    swapped.replace(link)
    assert papers.renew()
    assert papers.pems.cert == (tmp_path / "2" / "carol.pem").read_bytes()


def test_token_is_read_again(carol: Security, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    papers = CredentialFiles(replace(carol, token_file=str(file)))
    assert papers.token == "first"
    file.write_text("second\n")
    assert not papers.renew(), "a token needs no other connection"
    assert papers.token == "second"


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "ümlaut", "x" * 5_000])
def test_token_that_can_not_be_sent_is_refused_without_being_shown(
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
def test_file_that_is_of_no_use_is_named(carol: Security, spoil: Callable[[Security], str]) -> None:
    path = spoil(carol)
    with pytest.raises(InvalidArgument) as refused:
        CredentialFiles(carol)
    assert path in refused.value.message
    assert "a certificate and its own key" in refused.value.remedy


def test_file_of_a_token_that_is_not_there_is_named_as_that(tmp_path: Path) -> None:
    missing = str(tmp_path / "token")
    with pytest.raises(InvalidArgument) as refused:
        CredentialFiles(Security(token_file=missing))
    assert missing in refused.value.message
    assert "nothing but the token" in refused.value.remedy


def test_certificate_and_key_go_together_and_there_is_one_token() -> None:
    with pytest.raises(InvalidArgument, match="go together"):
        Security(cert_file="carol.pem")
    with pytest.raises(InvalidArgument, match="two tokens"):
        Security(token=Secret(SECRET), token_file="token")


def test_neither_token_nor_key_is_shown_and_the_token_travels(carol: Security) -> None:
    security = replace(carol, token=Secret(SECRET))
    shown = f"{security!r} {security} {CredentialFiles(security).__dict__.get('pems')!r}"
    assert SECRET not in shown
    assert "PRIVATE KEY" not in shown
    assert from_json(to_json(security)) == security
    assert pickle.loads(pickle.dumps(security)) == security


def test_keys_are_for_nobody_else(authority: CertificateAuthority, carol: Security) -> None:
    for path in (carol.key_file, authority.folder / "ca.key"):
        assert Path(path).stat().st_mode & 0o077 == 0
    assert "PRIVATE KEY" not in text_of(carol.cert_file)
