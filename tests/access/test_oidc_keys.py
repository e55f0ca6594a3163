"""Goal: the keys of the issuer are current, and their source is read in bounds.

A rotated key is known soon after its first use, a removed key ends its tokens, the keys stay valid
for a bounded time while the URL is unreachable, and reading does not block the event loop.
Method: a source of the test in virtual time; a real https server and a real file.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from batonmq._common.clock import Clock
from batonmq.errors import NotServing, Unauthenticated
from batonmq_server.local.certificates import CertificateAuthority, CertificateSubject
from batonmq_server.runtime.access.oidc import OidcTokens
from batonmq_server.runtime.access.oidc_keys import (
    DOCUMENT_BYTES_MAX,
    IssuerKeys,
    KeyFile,
    KeyUrl,
    parse_keys,
)
from tests.access.issuer import (
    STALE_MS_MAX,
    Document,
    Issuer,
    https_server,
    keys_of,
    private_key,
    public_jwk,
    tokens_of,
    trust,
)
from tests.storage.schedule_scene import SetClock
from tests.support.conditions import until


@asynccontextmanager
async def running(keys: IssuerKeys) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(keys.run())
        yield
        task.cancel()


def issuer_of(clock: Clock, *key_ids: str) -> Issuer:
    made = Issuer(clock)
    for key_id in key_ids:
        made.add_key(key_id)
    return made


def is_valid(tokens: OidcTokens, token: str) -> bool:
    try:
        return bool(tokens.verify(token))
    except (NotServing, Unauthenticated):
        return False


# ---- the document


@pytest.mark.parametrize(
    "document",
    [b"", b"\xff", b"[]", b"{}", b'{"keys": {}}', b'{"keys": []}', b'{"keys": [7, null, {}]}',
     b"[" * 100_000],
)  # fmt: skip
def test_document_without_a_usable_key_is_an_error(document: bytes) -> None:
    with pytest.raises(ValueError):
        parse_keys(document)


def test_keys_for_other_uses_are_left_out() -> None:
    def jwk(key_id: str, algorithm: str = "ES256", **members: Any) -> dict[str, Any]:
        return public_jwk(private_key(algorithm), algorithm, key_id, **members)

    secret = {"kty": "oct", "k": "c2VjcmV0", "kid": "secret", "alg": "HS256"}
    broken = {**jwk("broken"), "x": "AAAA"}
    entries = [
        jwk("good", use="sig"), jwk("rsa", "RS256", alg="RS256"), jwk("enc", use="enc"),
        jwk("pss", "RS256", alg="PS256"), {**jwk("number"), "kid": 7}, secret, broken,
        {**jwk("curve"), "crv": "P-384"}, {"kty": "RSA", "kid": "bare"},
    ]  # fmt: skip
    keys = parse_keys(json.dumps({"keys": entries}).encode())
    assert [(key.key_id, key.algorithm) for key in keys] == [("good", "ES256"), ("rsa", "RS256")]


# ---- rotation and outages, by a clock of the test


async def test_no_token_is_valid_before_the_keys_are_read() -> None:
    clock = SetClock()
    issuer = issuer_of(clock, "one")
    tokens = tokens_of(Document(issuer.document()), clock)
    with pytest.raises(NotServing):
        tokens.verify(issuer.token())
    await tokens.keys._read()
    assert tokens.verify(issuer.token()).identity == "oidc:alice"


async def test_unknown_key_wakes_one_read_and_the_caller_retries() -> None:
    clock = SetClock()
    issuer = issuer_of(clock, "one")
    source = Document(issuer.document(), pause_ms=1)
    tokens = tokens_of(source, clock)
    async with running(tokens.keys):
        await until(lambda: is_valid(tokens, issuer.token()))
        issuer.add_key("two")
        source.document = issuer.document()
        assert source.reads == 1
        clock.pass_ms(60_000)
        with pytest.raises(NotServing) as asked_again:
            tokens.verify(issuer.token("two"))
        assert asked_again.value.retry_after_ms
        await until(lambda: is_valid(tokens, issuer.token("two")))
        assert source.reads == 2


async def test_unknown_keys_cause_a_bounded_number_of_reads() -> None:
    clock = SetClock()
    issuer, stranger = issuer_of(clock, "one"), issuer_of(clock, "other")
    source = Document(issuer.document())
    tokens = tokens_of(source, clock)
    async with running(tokens.keys):
        await until(lambda: is_valid(tokens, issuer.token()))
        for _ in range(100):
            with pytest.raises(Unauthenticated, match="'other', which its issuer does not have"):
                tokens.verify(stranger.token("other"))
            await asyncio.sleep(0)
        assert source.reads == 1, "the keys were read again too soon"


async def test_removed_key_ends_its_tokens_and_notifies_listeners() -> None:
    clock = SetClock()
    issuer = issuer_of(clock, "one", "two")
    source = Document(issuer.document())
    tokens = tokens_of(source, clock)
    changes: list[str] = []
    tokens.keys.on_change.append(lambda: changes.append("changed"))
    await tokens.keys._read()
    old, new = issuer.token("one"), issuer.token("two")
    verified = tokens.verify(old)
    del issuer.keys["one"]
    source.document = issuer.document()
    await tokens.keys._read()
    assert changes == ["changed"] * 2
    with pytest.raises(Unauthenticated, match="a key that its issuer no longer has"):
        tokens.check_current(verified)
    with pytest.raises(Unauthenticated):
        tokens.verify(old)
    assert is_valid(tokens, new)


async def test_other_key_under_a_known_id_ends_the_tokens_of_the_first() -> None:
    clock = SetClock()
    issuer = issuer_of(clock, "one")
    source = Document(issuer.document())
    tokens = tokens_of(source, clock)
    await tokens.keys._read()
    old = issuer.token()
    assert is_valid(tokens, old)
    issuer.add_key("one")
    source.document = issuer.document()
    await tokens.keys._read()
    assert not is_valid(tokens, old)
    assert is_valid(tokens, issuer.token())


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("no JSON"), b"{}"])
async def test_keys_stay_valid_for_a_bounded_time_while_they_cannot_be_read(
    error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    clock, registry = SetClock(), CollectorRegistry()
    issuer = issuer_of(clock, "one")
    source = Document(issuer.document())
    tokens = OidcTokens(trust(), keys_of(source, clock, registry), clock)
    await tokens.keys._read()
    source.document = error
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            await tokens.keys._read()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert registry.get_sample_value("baton_oidc_key_failures_total") == 3
    token = issuer.token(exp=4_000_000_000)
    clock.pass_ms(STALE_MS_MAX)
    assert is_valid(tokens, token)
    clock.pass_ms(1)
    with pytest.raises(NotServing, match="could not be read for 3600 s"):
        tokens.verify(token)
    source.document = issuer.document()
    await tokens.keys._read()
    assert is_valid(tokens, token)
    read_s = registry.get_sample_value("baton_oidc_keys_read_timestamp_seconds")
    assert read_s == clock.unix_ms() / 1000


# ---- real sources


async def test_keys_of_an_https_url_are_followed_through_a_rotation_and_an_outage(
    tmp_path: Path,
) -> None:
    clock = Clock()
    authority = CertificateAuthority(tmp_path)
    served = authority.issue(CertificateSubject(name="issuer", hosts=("localhost",)))
    issuer = issuer_of(clock, "one")
    with https_server(served) as answers:
        answers.body = issuer.document()
        source = KeyUrl(answers.url, str(authority.ca_file), 50)
        tokens = tokens_of(source, clock)
        async with running(tokens.keys):
            await until(lambda: is_valid(tokens, issuer.token()))
            issuer.add_key("two")
            answers.body = issuer.document()
            await until(lambda: is_valid(tokens, issuer.token("two")))
            answers.status = 503
            count = answers.count
            await until(lambda: answers.count > count + 2)
            assert is_valid(tokens, issuer.token())
            issuer.keys = {"three": issuer.keys["two"]}
            answers.body, answers.status = issuer.document(), 200
            await until(lambda: is_valid(tokens, issuer.token("three")))


@pytest.mark.parametrize("case", ["stranger", "redirect", "large", "no http"])
async def test_answer_that_is_not_the_issuers_is_not_used(tmp_path: Path, case: str) -> None:
    clock = Clock()
    authority = CertificateAuthority(tmp_path / "trusted")
    other = CertificateAuthority(tmp_path / "other") if case == "stranger" else authority
    served = other.issue(CertificateSubject(name="issuer", hosts=("localhost",)))
    with https_server(served) as answers:
        answers.body = issuer_of(clock, "one").document()
        if case == "redirect":
            answers.status, answers.headers = 302, {"Location": f"{answers.url}/other"}
        elif case == "large":
            answers.body = b" " * (DOCUMENT_BYTES_MAX + 1)
        elif case == "no http":
            answers.headers = {"Content-Encoding": "\r\n\r\nx"}
            answers.body = b"x"
        source = KeyUrl(answers.url, str(authority.ca_file), 50)

        def read() -> None:
            parse_keys(source.read())

        with pytest.raises((OSError, ValueError)):
            await asyncio.to_thread(read)
        assert answers.count <= 1, "no redirect is followed"


async def test_slow_issuer_does_not_block_the_event_loop() -> None:
    clock = Clock()
    issuer = issuer_of(clock, "one")
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Slow(Document):
        def read(self) -> bytes:
            asyncio.run_coroutine_threadsafe(done.wait(), loop).result(30)
            return super().read()

    tokens = tokens_of(Slow(issuer.document()), clock)
    async with running(tokens.keys):
        for _ in range(10):
            await asyncio.sleep(0)
            assert not is_valid(tokens, issuer.token())
        done.set()
        await until(lambda: is_valid(tokens, issuer.token()))


async def test_replaced_file_is_read_again(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "keys.json"
    issuer = issuer_of(clock, "one")
    path.write_bytes(issuer.document())
    tokens = tokens_of(KeyFile(str(path), 20, 20), clock)
    async with running(tokens.keys):
        await until(lambda: is_valid(tokens, issuer.token()))
        old = issuer.token()
        path.unlink()
        assert is_valid(tokens, old)
        issuer.add_key("one")
        fresh = tmp_path / "fresh.json"
        fresh.write_bytes(issuer.document())
        fresh.rename(path)
        await until(lambda: is_valid(tokens, issuer.token()))
        assert not is_valid(tokens, old)
