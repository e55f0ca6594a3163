"""Signatures of RocketMQ 5 clients, sealed secrets, and access keys as a gateway knows them.

Goal: a signature counts only if its key, its date and its digits are right, and each refusal says
why. A sealed secret opens only with its key and for its own name.
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from pathlib import Path

import pytest

from baton.nameserver.v1 import stored_access_pb2 as pb
from batonmq._common.secret import Secret
from batonmq._process.config import ConfigError
from batonmq_server.gateway.access_keys import AccessKeys
from batonmq_server.gateway.core.signatures import (
    BadSignature,
    check_date,
    check_signature,
    is_signature,
    parse_signature,
    sign,
)
from batonmq_server.runtime.access.sealing import (
    NotOpened,
    SealingKeys,
    new_sealing_key,
    read_sealing_keys,
    sealing_keys,
)
from batonmq_server.runtime.access.stored_access import sealing_context
from batonmq_server.runtime.etcd.session import KeyValue

SECRET = Secret("s3cret-of-shop")
DATE = "20261124T040000Z"
NOW_MS = int(datetime(2026, 11, 24, 4, tzinfo=UTC).timestamp() * 1_000)
HOUR_MS = 3_600_000
KEYS = SealingKeys([bytes(range(32))])


def test_signature_counts_in_either_case_and_for_its_date_only() -> None:
    # printf 20261124T040000Z | openssl dgst -sha1 -hmac s3cret-of-shop
    digits = "d33a8aaa8119a9a3b575585c3137cc6108bc4f98"
    header = sign("AK", SECRET, DATE)
    assert header.endswith(f"Signature={digits}")
    signature = parse_signature(header, DATE)
    assert is_signature(header)
    assert not is_signature("Bearer MQv2")
    assert (signature.access_key, signature.date) == ("AK", DATE)
    check_signature(signature, [Secret("another"), SECRET])
    check_signature(parse_signature(header[:-40] + header[-40:].upper(), DATE), [SECRET])
    with pytest.raises(BadSignature, match="not made with the secret"):
        check_signature(parse_signature(header[:-40] + digits[::-1], DATE), [SECRET])
    with pytest.raises(BadSignature, match="not made with the secret"):
        check_signature(parse_signature(header, "20261124T040001Z"), [SECRET])
    with pytest.raises(BadSignature, match="not made with the secret"):
        check_signature(parse_signature(header[:-40] + "ä" * 40, DATE), [SECRET])


@pytest.mark.parametrize(
    ("header", "access_key"),
    [
        ("MQv2-HMAC-SHA1 Credential=AK/region/rocketmq, SignedHeaders=x-mq-date-time, Signature=AB",
         "AK"),
        ("MQv2-HMAC-SHA1 Signature=AB,Credential=AK", "AK"),
        ("MQv2-HMAC-SHA1 Credential=, SignedHeaders=x-mq-date-time, Signature=AB", ""),
    ],
)  # fmt: skip
def test_forms_of_the_clients_are_understood(header: str, access_key: str) -> None:
    assert parse_signature(header, DATE).access_key == access_key


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("MQv2-HMAC-SHA1", "must be MQv2"),
        ("MQv2-HMAC-SHA1 Credential=AK", "must be MQv2"),
        ("MQv2-HMAC-SHA1 Credential=AK, SignedHeaders=host, Signature=AB", "SignedHeaders must be"),
        ("MQv2-HMAC-SHA1 " + "x" * 3_000, "longer than"),
    ],
)
def test_malformed_signature_is_refused_with_its_reason(header: str, reason: str) -> None:
    with pytest.raises(BadSignature, match=reason):
        parse_signature(header, DATE)


def check(date: str, now_ms: int, *, local_times: bool = False) -> None:
    check_date(date, now_ms, window_ms=300_000, local_times=local_times)


def test_date_counts_within_the_window_only() -> None:
    check(DATE, NOW_MS - 300_000)
    check(DATE, NOW_MS + 300_000)
    with pytest.raises(BadSignature, match="301 s behind the clock of the gateway"):
        check(DATE, NOW_MS + 301_000)
    with pytest.raises(BadSignature, match=r"3600 s ahead of .* TZ=UTC"):
        check(DATE, NOW_MS - HOUR_MS)
    for bad in ("", "20261324T040000Z", DATE[:-1], f"٢{DATE[1:]}"):
        with pytest.raises(BadSignature, match="must be a time like"):
            check(bad, NOW_MS)


@pytest.mark.parametrize(
    "date",
    ["2026-11-24T04:00:00Z", "2026-11-24T04:00:00.123456789Z", "2026-11-24T09:30:00.5+05:30"],
)
def test_date_of_rfc_3339_counts_by_its_own_zone(date: str) -> None:
    check(date, NOW_MS + 300_000)
    with pytest.raises(BadSignature, match="301 s behind the clock of the gateway"):
        check(date, NOW_MS + 301_000)


@pytest.mark.parametrize(
    "date",
    [
        "2026-11-24T04:00:00",  # without a zone
        "2026-11-24 04:00:00Z",
        "2026-13-24T04:00:00Z",
        "2026-11-24T04:00:00+99:00",
        "2026-11-24T04:00:00.Z",
        "0001-01-01T00:00:00+14:00",
    ],
)
def test_date_of_another_form_is_refused(date: str) -> None:
    with pytest.raises(BadSignature):
        check(date, NOW_MS)


def test_local_time_counts_if_the_setting_says_so() -> None:
    for hours in (-14, -3.5, 0, 5.75, 14):
        check(DATE, NOW_MS + int(hours * HOUR_MS) + 200_000, local_times=True)
    for off_ms in (HOUR_MS + 400_000, 15 * HOUR_MS):
        with pytest.raises(BadSignature):
            check(DATE, NOW_MS + off_ms, local_times=True)


def test_sealed_secret_opens_with_its_key_and_for_its_name_only() -> None:
    sealed = KEYS.seal(SECRET, "AK shop")
    assert SECRET.reveal().encode() not in sealed.sealed
    assert KEYS.open(sealed.sealed, "AK shop") == SECRET
    assert KEYS.seal(SECRET, "AK shop").sealed != sealed.sealed
    other = SealingKeys([bytes(32)])
    for keys, text, context in (
        (KEYS, sealed.sealed, "AK admin"),
        (KEYS, sealed.sealed[:-1], "AK shop"),
        (KEYS, b"", "AK shop"),
        (other, sealed.sealed, "AK shop"),
    ):
        with pytest.raises(NotOpened):
            keys.open(text, context)
    rotated = SealingKeys([bytes(32), bytes(range(32))])
    assert rotated.open(sealed.sealed, "AK shop") == SECRET
    assert rotated.seal(SECRET, "AK shop").key_id != sealed.key_id


def test_file_of_sealing_keys_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "sealing.key"
    file.write_text(f"{new_sealing_key()}\n\n{new_sealing_key()}\n")
    assert read_sealing_keys(str(file)).open is not None
    assert sealing_keys("") is None
    for bad in ("", "x\n", base64.b64encode(bytes(31)).decode(), "ä"):
        file.write_text(bad)
        with pytest.raises(ConfigError, match="sealing_key_file"):
            sealing_keys(str(file))
    with pytest.raises(ConfigError, match="No such file"):
        sealing_keys(str(tmp_path / "absent"))


def stored(name: str, identity: str = "shop", **fields: int) -> KeyValue:
    context = sealing_context(name, identity)
    message = pb.StoredAccessKey(
        access_key=name,
        identity=identity,
        sealed_secret=KEYS.seal(SECRET, context).sealed,
        previous_sealed_secret=KEYS.seal(Secret("old-secret"), context).sealed,
        **fields,  # type: ignore[arg-type]
    )
    return KeyValue(f"keys/{name}", message.SerializeToString(), 1, 1, 0)


def test_access_keys_follow_their_mirror(caplog: pytest.LogCaptureFixture) -> None:
    keys = AccessKeys(KEYS)
    values = {
        "keys/A": stored("A", previous_expire_unix_ms=NOW_MS + 10),
        "keys/B": stored("B", expire_unix_ms=NOW_MS + 10),
        "keys/moved": KeyValue("keys/moved", stored("A").value, 1, 1, 0),
        "keys/broken": KeyValue("keys/broken", b"\xff", 1, 1, 0),
        "grants/shop": KeyValue("grants/shop", b"", 1, 1, 0),
    }
    assert keys.update(values, values)
    assert not keys.update(["grants/shop"], values)
    found = keys.find("A", NOW_MS)
    assert found is not None
    assert found.secrets(NOW_MS) == [SECRET, Secret("old-secret")]
    assert found.secrets(NOW_MS + 10) == [SECRET]
    assert keys.find("B", NOW_MS + 9) is not None
    assert keys.find("B", NOW_MS + 10) is None, "it has expired"
    assert keys.find("moved", NOW_MS) is None, "its bytes are those of another name"
    assert keys.find("broken", NOW_MS) is None
    assert "unreadable access key name=broken" in caplog.text
    assert keys.update(["keys/A"], {})
    assert keys.find("A", NOW_MS) is None
    assert not AccessKeys(None).usable
