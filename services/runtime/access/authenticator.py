"""The authentication of callers: by a bearer token, if the call has one, else by a certificate.

A token is one of the cluster, known by its digest in etcd, or one of the OIDC issuer. Either may be
bound to a client certificate: then it is valid only over a connection with that certificate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import grpc.aio

from batonmq._common.clock import Clock
from batonmq.errors import Unauthenticated
from batonmq_server.runtime.access import stored_access
from batonmq_server.runtime.access.blocks import BlockList
from batonmq_server.runtime.access.client_certificate import (
    ClientCertificate,
    certificate_of,
    is_plain,
)
from batonmq_server.runtime.access.oidc import OidcTokens, VerifiedToken
from batonmq_server.runtime.access.permissions import (
    NO_SCOPES,
    SERVICE_PREFIX,
    Authorizer,
    Scopes,
)

Context = grpc.aio.ServicerContext[Any, Any]
Metadata = Iterable[tuple[str, str | bytes]]

_AUTHORIZATION, _BEARER = "authorization", "bearer "
_PEM, _URI = "x509_pem_cert", "peer_uri"
_NAMES = (_URI, "peer_dns", "x509_common_name")
"""Names of a certificate in order; the first one present is the identity. An authority often signs
any common name, so a common name is never the identity of a service."""


class Caller(NamedTuple):
    """An authenticated caller.

    Attributes:
        digest: Digest of its token of the cluster; empty if it has none.
        expire_unix_ms: Wall clock at which the token expires; 0 for never.
        scopes: Scopes of the token.
        certificate: Client certificate of its connection; None if it has none.
        issued: Its token of the OIDC issuer; None if it has none.
        bound_to: SHA-256 of the certificate that its token is bound to; empty for none.
    """

    identity: str
    digest: str = ""
    expire_unix_ms: int = 0
    scopes: Scopes = NO_SCOPES
    certificate: ClientCertificate | None = None
    issued: VerifiedToken | None = None
    bound_to: str = ""


class Authenticator:
    """Finds the caller of a call. All methods raise Unauthenticated with the reason.

    Args:
        authorizer: Knows the tokens of the cluster.
        blocks: The blocked identities and certificates.
        certificates: Whether clients must show a certificate. If not, only tokens identify callers.
        oidc: The tokens of the OIDC issuer; None for none.

    Attributes:
        tokens_need_tls: Whether a token is refused on a connection without TLS.
    """

    def __init__(
        self,
        authorizer: Authorizer,
        blocks: BlockList,
        clock: Clock,
        *,
        certificates: bool,
        oidc: OidcTokens | None,
    ) -> None:
        self._authorizer, self._blocks, self._clock = authorizer, blocks, clock
        self._certificates, self._oidc = certificates, oidc
        self.tokens_need_tls = False

    def caller(self, context: Context) -> Caller:
        """Return the caller of a call, with the certificate of its connection."""
        caller = self.by_token(context.invocation_metadata() or ())
        return self.by_connection(caller, context)

    def by_connection(self, caller: Caller | None, context: Context) -> Caller:
        """Return a caller with the certificate of its connection.

        Args:
            caller: Identified by its token or its signature; None if only the certificate names it.
        """
        properties = context.auth_context()
        certificate = _certificate(properties)
        if caller is None:
            caller = Caller(self._named(properties))
        elif self._is_exposed(caller, properties):
            raise Unauthenticated(
                "the call has a bearer token, and its connection no TLS: any listener could use it",
                remedy="Use the port with TLS, and replace the token: it may be known.",
                facts={"identity": caller.identity},
            )
        elif caller.bound_to and (certificate is None or certificate.sha256 != caller.bound_to):
            raise Unauthenticated(
                f"the token of {caller.identity} is bound to a client certificate, and this "
                f"connection has {'another one' if certificate is not None else 'none'}",
                remedy="Use the token together with the certificate that it was made for.",
                facts={"identity": caller.identity},
            )
        self._blocks.check(caller.identity, certificate)
        return caller._replace(certificate=certificate)

    def _is_exposed(self, caller: Caller, properties: Any) -> bool:
        """Return whether a listener could have read the token of a call."""
        has_token = bool(caller.digest) or caller.issued is not None
        return self.tokens_need_tls and has_token and is_plain(properties)

    def by_token(self, metadata: Metadata) -> Caller | None:
        """Return the caller that a token identifies; None without a token."""
        for key, value in metadata:
            if key == _AUTHORIZATION:
                caller = self._of_token(value)
                self._blocks.check(caller.identity, None)
                return caller
        return None

    def early_caller(self, metadata: Metadata) -> Caller | None:
        """Return the caller that a token names; None if only a certificate may name it."""
        caller = self.by_token(metadata)
        if caller is None and not self._certificates:
            raise Unauthenticated("the call has no bearer token")
        return caller

    def check_still_valid(self, caller: Caller) -> None:
        """Return if the credentials of a caller, which were valid, are valid now."""
        self._blocks.check(caller.identity, caller.certificate)
        if caller.issued is not None and self._oidc is not None:
            self._oidc.check_current(caller.issued)
        if caller.digest:
            token = self._authorizer.token_of(caller.digest, self._clock.unix_ms())
            if token.identity != caller.identity:
                raise Unauthenticated("the bearer token now belongs to another identity")

    def _of_token(self, value: str | bytes) -> Caller:
        text = value if isinstance(value, str) else value.decode(errors="replace")
        if text[: len(_BEARER)].lower() != _BEARER:
            raise Unauthenticated("the authorization metadata of the call are not a bearer token")
        token = text[len(_BEARER) :].strip()
        if self._oidc is not None and self._oidc.accepts(token):
            issued = self._oidc.verify(token)
            return Caller(
                issued.identity,
                expire_unix_ms=issued.expire_unix_ms,
                issued=issued,
                bound_to=issued.certificate_sha256,
            )
        digest = stored_access.digest_of(token)
        known = self._authorizer.token_of(digest, self._clock.unix_ms())
        return Caller(
            known.identity,
            digest,
            known.expire_unix_ms,
            known.scopes,
            bound_to=known.certificate_sha256,
        )

    def _named(self, properties: Any) -> str:
        """Return the identity of the certificate of a connection."""
        for name in _NAMES:
            values = properties.get(name)
            identity = next(iter(values)).decode(errors="replace") if values else ""
            if identity:
                if name != _URI and identity.startswith(SERVICE_PREFIX):
                    raise Unauthenticated(
                        "the identity of a service must be a URI in its certificate"
                    )
                if self._oidc is not None and identity.startswith(self._oidc.trust.identity_prefix):
                    raise Unauthenticated(
                        f"{identity} in the certificate has the prefix of the OIDC issuer's "
                        "identities",
                        remedy="Use a certificate with another name.",
                    )
                return identity
        raise Unauthenticated("the call has neither a bearer token nor a client certificate")


def _certificate(properties: Any) -> ClientCertificate | None:
    """Return the client certificate of a connection; None if it has none."""
    values = properties.get(_PEM)
    if not values:
        return None
    try:
        return certificate_of(next(iter(values)))
    except ValueError as error:
        raise Unauthenticated(f"the client certificate can't be read: {error}") from error
