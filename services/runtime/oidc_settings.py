"""The tokens of the OIDC issuer, as the settings of a service describe it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from batonmq._common.clock import Clock
from batonmq_server.runtime.access.oidc import OidcTokens, OidcTrust
from batonmq_server.runtime.access.oidc_keys import IssuerKeys, KeyFile, KeySource, KeyUrl
from batonmq_server.runtime.metrics import OidcMetrics
from batonmq_server.runtime.settings import ServiceSettings, names_of


def key_source(settings: ServiceSettings) -> KeySource:
    """Return the source of the issuer's keys."""
    if settings.oidc_jwks_file:
        return KeyFile(settings.oidc_jwks_file)
    return KeyUrl(settings.oidc_jwks_url, settings.oidc_ca_file, settings.oidc_refresh_ms)


def oidc_tokens(
    settings: ServiceSettings, clock: Clock, registry: CollectorRegistry
) -> OidcTokens | None:
    """Return the tokens of the issuer; None if the settings have none."""
    if not settings.oidc_issuer:
        return None
    trust = OidcTrust(
        issuer=settings.oidc_issuer,
        audiences=names_of(settings.oidc_audience),
        algorithms=frozenset(names_of(settings.oidc_algorithms)),
        identity_claim=settings.oidc_identity_claim,
        identity_prefix=settings.oidc_identity_prefix,
        leeway_ms=settings.oidc_leeway_ms,
    )
    keys = IssuerKeys(
        key_source(settings),
        clock,
        OidcMetrics(registry),
        stale_ms_max=settings.oidc_stale_ms_max,
    )
    return OidcTokens(trust, keys, clock)
