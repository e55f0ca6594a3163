"""An OIDC issuer of the tests: its keys, its tokens, and its JWK set over https."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from prometheus_client import CollectorRegistry

from batonmq._common.clock import Clock
from batonmq._connection.security import Security
from batonmq_server.runtime.access.oidc import OidcTokens, OidcTrust
from batonmq_server.runtime.access.oidc_keys import IssuerKeys, KeySource
from batonmq_server.runtime.metrics import OidcMetrics

ISSUER, AUDIENCE = "https://login.example.org/", "baton-test"
LEEWAY_MS = 30_000
STALE_MS_MAX = 3_600_000
_ALGORITHMS: dict[str, Any] = {
    "RS256": jwt.algorithms.RSAAlgorithm,
    "ES256": jwt.algorithms.ECAlgorithm,
    "EdDSA": jwt.algorithms.OKPAlgorithm,
}


def private_key(algorithm: str, bits: int = 2_048) -> Any:
    """Return a new key for signatures of an algorithm."""
    if algorithm == "RS256":
        return rsa.generate_private_key(public_exponent=65_537, key_size=bits)
    if algorithm == "ES256":
        return ec.generate_private_key(ec.SECP256R1())
    return ed25519.Ed25519PrivateKey.generate()


def public_jwk(key: Any, algorithm: str, key_id: str, **members: Any) -> dict[str, Any]:
    """Return the public half of a key as a JWK."""
    return {
        **_ALGORITHMS[algorithm].to_jwk(key.public_key(), as_dict=True),
        "kid": key_id,
        **members,
    }


@dataclass
class Issuer:
    """Keys by their id, and tokens signed with them."""

    clock: Clock
    keys: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def add_key(self, key_id: str, algorithm: str = "ES256") -> None:
        self.keys[key_id] = algorithm, private_key(algorithm)

    def document(self) -> bytes:
        """Return the JWK set."""
        entries = [public_jwk(key, name, key_id) for key_id, (name, key) in self.keys.items()]
        return json.dumps({"keys": entries}).encode()

    def token(
        self, key_id: str = "one", *, headers: dict[str, Any] | None = None, **claims: Any
    ) -> str:
        """Return a token; a claim that is None is left out."""
        algorithm, key = self.keys[key_id]
        now_s = self.clock.unix_ms() // 1000
        all_claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": now_s + 600, **claims}
        payload = {name: value for name, value in all_claims.items() if value is not None}
        return jwt.encode(payload, key, algorithm, {"kid": key_id, **(headers or {})})


@dataclass
class Document(KeySource):
    """A source of keys that the test sets; an error is raised."""

    document: bytes | Exception
    interval_ms: int = 300_000
    pause_ms: int = 10_000
    reads: int = 0

    def read(self) -> bytes:
        self.reads += 1
        if isinstance(self.document, Exception):
            raise self.document
        return self.document


def trust(**changes: Any) -> OidcTrust:
    """Return what the tests trust."""
    values: dict[str, Any] = {
        "issuer": ISSUER,
        "audiences": (AUDIENCE,),
        "algorithms": frozenset({"RS256", "ES256", "EdDSA"}),
        "identity_claim": "sub",
        "identity_prefix": "oidc:",
        "leeway_ms": LEEWAY_MS,
    }
    return OidcTrust(**(values | changes))


def keys_of(
    source: KeySource, clock: Clock, registry: CollectorRegistry | None = None
) -> IssuerKeys:
    """Return the keys of a source, which are not read yet."""
    metrics = OidcMetrics(registry or CollectorRegistry())
    return IssuerKeys(source, clock, metrics, stale_ms_max=STALE_MS_MAX)


def tokens_of(source: KeySource, clock: Clock, **changes: Any) -> OidcTokens:
    """Return the tokens of an issuer, whose keys are not read yet."""
    return OidcTokens(trust(**changes), keys_of(source, clock), clock)


@dataclass
class HttpsAnswers:
    """What an https server answers, and how often it was asked."""

    url: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    count: int = 0


@contextmanager
def https_server(security: Security) -> Iterator[HttpsAnswers]:
    """Serve on `localhost` with this certificate, in a thread."""
    answers = HttpsAnswers()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers.count += 1
            self.send_response(answers.status)
            for name, value in answers.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answers.body)))
            self.end_headers()
            self.wfile.write(answers.body)

        def log_message(self, *_: Any) -> None:
            return

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            return  # a client that does not trust the certificate

    server = Server(("localhost", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(security.cert_file, security.key_file)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    answers.url = f"https://localhost:{server.server_port}/keys"
    try:
        yield answers
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
