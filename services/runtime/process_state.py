"""What a process knows of itself, for `baton cluster check`: version, clock, descriptors, TLS."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

from baton.settings.v1 import settings_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq_server.runtime.descriptors import descriptors_max, open_descriptors

_PACKAGE = "batonmq-server"


def process_state(
    clock: Clock, expiries: Mapping[str, Callable[[], float]], *, access_on: bool
) -> pb.ProcessState:
    """Return the state of this process now.

    Args:
        expiries: By certificate, as `tls.certificate_expiries` returns them.
        access_on: Whether the process checks permissions.
    """
    return pb.ProcessState(
        version=package_version(),
        unix_ms=clock.unix_ms(),
        open_descriptors=open_descriptors(),
        descriptors_max=descriptors_max(),
        access_on=access_on,
        certificates=[_expiry(name, read()) for name, read in sorted(expiries.items())],
    )


def package_version() -> str:
    """Return the version of the package of the services; empty if it is not installed."""
    try:
        return version(_PACKAGE)
    except PackageNotFoundError:
        return ""


def _expiry(name: str, expire_unix_s: float) -> pb.CertificateExpiry:
    known = not math.isnan(expire_unix_s)
    return pb.CertificateExpiry(
        certificate=name, expire_unix_ms=round(expire_unix_s * 1_000) if known else None
    )
