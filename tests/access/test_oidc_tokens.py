"""Goal: a token of the OIDC issuer gives the identity of its claim, and no other token does.

Each refusal is UNAUTHENTICATED with its precise reason, whatever the bytes of the token are.
Method: an issuer with keys made by the test, and a clock of the test.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
from hashlib import sha256
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from batonmq.errors import Unauthenticated
from batonmq_server.runtime.access.oidc import REMEMBERED_MAX, OidcTokens
from batonmq_server.runtime.access.oidc_keys import IssuerKeys
from tests.access.issuer import (
    AUDIENCE,
    ISSUER,
    LEEWAY_MS,
    Document,
    Issuer,
    private_key,
    tokens_of,
)
from tests.storage.schedule_scene import SetClock

ALGORITHMS = ["RS256", "ES256", "EdDSA"]


class Scene:
    """An issuer with a key for each algorithm, named like the algorithm; "one" is for ES256."""

    def __init__(self) -> None:
        self.clock = SetClock()
        self.issuer = Issuer(self.clock)
        for key_id, algorithm in [("one", "ES256"), *zip(ALGORITHMS, ALGORITHMS, strict=True)]:
            self.issuer.add_key(key_id, algorithm)

    def tokens(self, **changes: Any) -> OidcTokens:
        made = tokens_of(Document(self.issuer.document()), self.clock, **changes)
        read_once(made.keys)
        return made


def read_once(keys: IssuerKeys) -> None:
    asyncio.run(keys._read())


@pytest.fixture(scope="module")
def here() -> Scene:
    return Scene()


def refusal(tokens: OidcTokens, token: str) -> str:
    with pytest.raises(Unauthenticated) as refused:
        tokens.verify(token)
    return refused.value.message


def encoded(part: object) -> str:
    raw = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_token_of_each_algorithm_gives_the_identity_with_the_prefix(
    here: Scene, algorithm: str
) -> None:
    token = here.issuer.token(algorithm)
    verified = here.tokens().verify(token)
    assert verified.identity == "oidc:alice"
    assert verified.expire_unix_ms == (here.clock.unix_ms() // 1000 + 600) * 1000 + LEEWAY_MS


def test_identity_is_in_the_configured_claim(here: Scene) -> None:
    tokens = here.tokens(identity_claim="client_id", identity_prefix="idp:")
    assert tokens.verify(here.issuer.token(client_id="shop")).identity == "idp:shop"
    assert refusal(tokens, here.issuer.token()) == (
        "the JSON Web Token has no text in the claim client_id"
    )


def test_one_of_several_audiences_is_enough(here: Scene) -> None:
    token = here.issuer.token(aud=["other", AUDIENCE])
    assert here.tokens(audiences=("x", AUDIENCE)).verify(token).identity == "oidc:alice"


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"iss": "https://other.example.org/"}, f"is not issued by {ISSUER}"),
        ({"iss": None}, "has no claim iss"),
        ({"aud": "other"}, f"is not for the audience {AUDIENCE}"),
        ({"aud": None}, "has no claim aud"),
        ({"exp": None}, "has no claim exp"),
        ({"exp": "soon"}, "has no time in the claim exp"),
        ({"exp": True}, "has no time in the claim exp"),
        ({"exp": 1e300}, "has no time in the claim exp"),
        ({"exp": float("nan")}, "has no time in the claim exp"),
        ({"nbf": []}, "has no time in the claim nbf"),
        ({"sub": None}, "has no text in the claim sub"),
        ({"sub": ""}, "has no text in the claim sub"),
        ({"sub": "a\nb"}, "names an unusable identity: 'oidc:a\\nb' is not a valid identity"),
        ({"cnf": {"jkt": "x"}}, "is bound in a way other than to a certificate"),
        ({"cnf": {"x5t#S256": "short"}}, "is bound in a way other than to a certificate"),
        ({"cnf": None, "cnf ": 1}, ""),
    ],
)
def test_token_with_a_wrong_claim_is_refused_with_the_reason(
    here: Scene, claims: dict[str, Any], reason: str
) -> None:
    token = here.issuer.token(**claims)
    if not reason:
        assert here.tokens().verify(token).certificate_sha256 == ""
        return
    assert refusal(here.tokens(), token).startswith(f"the JSON Web Token {reason}")


def test_times_are_checked_with_the_leeway_at_each_call(here: Scene) -> None:
    clock, tokens = here.clock, here.tokens()
    before_ms = clock.unix_ms()
    now_s = before_ms // 1000
    token = here.issuer.token(nbf=now_s + 20, exp=now_s + 60)
    assert tokens.verify(token).identity == "oidc:alice", "a time within the leeway was refused"
    late = here.issuer.token(nbf=now_s + 60)
    assert refusal(tokens, late) == "the JSON Web Token of oidc:alice is not valid yet"
    clock.pass_ms(60_000 + LEEWAY_MS - 1_000)
    tokens.verify(token)
    tokens.verify(late)
    clock.pass_ms(2_000)
    read_once(tokens.keys)
    assert refusal(tokens, token) == "the JSON Web Token of oidc:alice expired 31 s ago"


def test_signature_of_another_key_is_refused(here: Scene) -> None:
    forger = Issuer(here.clock)
    for algorithm in ALGORITHMS:
        forger.add_key(algorithm, algorithm)
        assert refusal(here.tokens(), forger.token(algorithm)) == (
            f"the JSON Web Token does not match the key {algorithm} of its issuer"
        )


def test_changed_claims_are_refused(here: Scene) -> None:
    header, claims, signature = here.issuer.token().split(".")
    changed = json.loads(base64.urlsafe_b64decode(f"{claims}==")) | {"sub": "root"}
    token = f"{header}.{encoded(changed)}.{signature}"
    assert "does not match the key one" in refusal(here.tokens(), token)


@pytest.mark.parametrize("algorithm", ["none", "None", "HS256", "HS512", "RS512", "", None, [], 7])
def test_other_algorithms_are_refused(here: Scene, algorithm: Any) -> None:
    """This includes a MAC with the public key as its secret: an attacker knows that key."""
    _, key = here.issuer.keys["RS256"]
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    header = encoded({"alg": algorithm, "kid": "RS256", "typ": "JWT"})
    payload = encoded({"iss": ISSUER, "aud": AUDIENCE, "sub": "root", "exp": 4e9})
    signature = encoded(hmac.digest(public, f"{header}.{payload}".encode(), sha256))
    for end in (signature, ""):
        message = refusal(here.tokens(), f"{header}.{payload}.{end}")
        assert "allowed are ES256, EdDSA, RS256" in message or "is malformed" in message


def test_algorithm_outside_the_settings_is_refused(here: Scene) -> None:
    tokens = here.tokens(algorithms=frozenset({"RS256"}))
    assert tokens.verify(here.issuer.token("RS256")).identity == "oidc:alice"
    assert refusal(tokens, here.issuer.token("EdDSA")) == (
        "the JSON Web Token is signed with EdDSA; allowed are RS256"
    )


def test_key_is_used_for_the_algorithm_of_its_type_only(here: Scene) -> None:
    token = here.issuer.token("EdDSA", headers={"kid": "RS256"})
    assert refusal(here.tokens(), token) == (
        "the JSON Web Token is signed with EdDSA, but the key 'RS256' is for RS256"
    )


def test_token_without_a_key_id_needs_the_only_key_of_its_algorithm(here: Scene) -> None:
    def without(key_id: str) -> str:
        algorithm, key = here.issuer.keys[key_id]
        claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": 4_000_000_000}
        return jwt.encode(claims, key, algorithm)

    assert here.tokens().verify(without("RS256")).identity == "oidc:alice"
    assert refusal(here.tokens(), without("one")) == (
        "the JSON Web Token has no key id, and its issuer has 2 such keys for ES256"
    )


def test_key_in_the_header_of_a_token_is_not_used(here: Scene) -> None:
    forger = Issuer(here.clock)
    forger.add_key("one")
    jwk = json.loads(forger.document())["keys"][0]
    token = forger.token(headers={"jwk": jwk, "x5c": ["AAAA"], "jku": "https://localhost/"})
    assert "does not match the key one" in refusal(here.tokens(), token)


def test_critical_header_that_is_not_known_is_refused(here: Scene) -> None:
    token = here.issuer.token(headers={"crit": ["exp2"], "exp2": 1})
    assert "is malformed" in refusal(here.tokens(), token)


@pytest.mark.parametrize(
    "token",
    ["..", "a.b.c", "e30.e30.", f"{encoded([])}.e30.e30", f"{encoded(b'[' * 9_000)}.e30.e30",
     "x" * 20_000 + "..", "\u00fc.\u00fc.\u00fc", f"{encoded({'alg': 'ES256', 'kid': 7})}.e30.e30"],
)  # fmt: skip
def test_malformed_token_is_refused(here: Scene, token: str) -> None:
    refusal(here.tokens(), token)


@given(st.binary(), st.binary(), st.binary())
def test_arbitrary_parts_are_refused(header: bytes, claims: bytes, signature: bytes) -> None:
    refusal(_ARBITRARY, f"{encoded(header)}.{encoded(claims)}.{encoded(signature)}")


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists))
def test_arbitrary_claims_of_the_issuer_are_refused(value: Any) -> None:
    refusal(_ARBITRARY, _SCENE.issuer.token(exp=value))
    refusal(_ARBITRARY, _SCENE.issuer.token(cnf={"x5t#S256": value}))


def test_token_is_verified_once_and_a_bounded_number_is_remembered(
    here: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, token = here.tokens(), here.issuer.token()
    verified = tokens.verify(token)
    with monkeypatch.context() as patch:
        patch.setattr(jwt, "decode", None)
        assert tokens.verify(token) is verified
        monkeypatch.setattr("batonmq_server.runtime.access.oidc.REMEMBERED_MAX", 3)
    for number in range(5):
        tokens.verify(here.issuer.token(sub=f"user-{number}"))
    assert len(tokens._verified) == 3 < REMEMBERED_MAX


def test_token_names_the_certificate_that_it_is_bound_to(here: Scene) -> None:
    digest = sha256(b"certificate").digest()
    token = here.issuer.token(cnf={"x5t#S256": encoded(digest)})
    assert here.tokens().verify(token).certificate_sha256 == digest.hex()


def test_weak_key_is_no_key(here: Scene) -> None:
    issuer = Issuer(here.clock, {"weak": ("RS256", private_key("RS256", 1_024))})
    issuer.add_key("one")
    tokens = tokens_of(Document(issuer.document()), here.clock)
    read_once(tokens.keys)
    assert [key.key_id for key in tokens.keys._keys] == ["one"]


_SCENE = Scene()
_ARBITRARY = _SCENE.tokens()
