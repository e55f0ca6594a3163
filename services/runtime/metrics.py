"""Metrics that every service process has."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from batonmq_server.runtime.descriptors import DescriptorShares, open_descriptors

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class RpcMetrics:
    """Metrics of the calls that a process answers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls = Counter(
            "baton_rpc_calls",
            "Calls by outcome: OK or the reason of the error.",
            ("service", "method", "reason"),
            registry=registry,
        )
        self.seconds = Histogram(
            "baton_rpc_seconds",
            "Time from request to answer in seconds, long polls included.",
            ("service", "method"),
            buckets=_BUCKETS,
            registry=registry,
        )
        self.open = Gauge(
            "baton_rpc_open", "Calls in progress.", ("service", "method"), registry=registry
        )


class AccessMetrics:
    """Metrics of authorization.

    Args:
        on: Whether access control is on.
    """

    def __init__(self, registry: CollectorRegistry, *, on: bool) -> None:
        self.refused = Counter(
            "baton_access_refused",
            "Calls, and items of batched calls, rejected by authentication or authorization; "
            "includes long polls and streams ended because a grant or token was revoked.",
            ("service", "reason"),
            registry=registry,
        )
        self.throttled = Counter(
            "baton_throttled_calls",
            "Calls rejected with THROTTLED, by the limit that their identity had reached.",
            ("quota",),
            registry=registry,
        )
        Gauge(
            "baton_access_on",
            "1 if access control is on, else 0.",
            registry=registry,
        ).set(on)


class OidcMetrics:
    """Metrics of the keys of the OIDC issuer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.read = Gauge(
            "baton_oidc_keys_read_timestamp_seconds",
            "Time of the last successful read of the OIDC issuer's keys, in Unix seconds; 0: none.",
            registry=registry,
        )
        self.failures = Counter(
            "baton_oidc_key_failures",
            "Failed reads of the OIDC issuer's keys.",
            registry=registry,
        )


def certificate_expiry(registry: CollectorRegistry) -> Gauge:
    """Register the gauge of the expiry times of certificates."""
    return Gauge(
        "baton_tls_certificate_expiry_timestamp_seconds",
        "Expiry time of TLS certificates, in Unix seconds: `service` is the certificate of the "
        "process, `authority` those it trusts, `etcd_client` and `etcd_authority` the same for "
        "connections to etcd. Of several certificates in a file the first to expire; NaN if the "
        "time can't be read.",
        ("certificate",),
        registry=registry,
    )


def export_descriptors(registry: CollectorRegistry, shares: DescriptorShares) -> None:
    """Export the open file descriptors, and the bounds of connections."""
    Gauge(
        "baton_descriptors_open",
        "Open file descriptors of the process: files and connections.",
        registry=registry,
    ).set_function(open_descriptors)
    limits = Gauge(
        "baton_connections_max",
        "Maximum number of connections: `clients` to the port of the service, `address` those of "
        "one address, `health` and `metrics` to these ports.",
        ("kind",),
        registry=registry,
    )
    limits.labels("clients").set(shares.clients)
    limits.labels("address").set(shares.per_address)
    limits.labels("health").set(shares.health)
    limits.labels("metrics").set(shares.metrics)
