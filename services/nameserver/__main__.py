"""`python -m services.nameserver`: names, routes and group membership."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as pb_grpc
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc

from services.nameserver.catalog import Catalog
from services.nameserver.config import NameserverSettings
from services.nameserver.expiry import Expiry
from services.nameserver.progress import Progress
from services.nameserver.server import NameserverServicer
from services.nameserver.shrinking import Shrinking
from services.nameserver.store import Store
from services.nameserver.telemetry import Telemetry
from services.runtime.peers import Peer
from services.runtime.process import App, Runtime, run


@asynccontextmanager
async def build(settings: NameserverSettings, runtime: Runtime) -> AsyncIterator[App]:
    """The nameserver's parts; it has nothing to recover, all state is in etcd."""
    catalog = Catalog(runtime.etcd, runtime.nodes, watchers_max=settings.watchers_max)
    store = Store(runtime.etcd, runtime.random, member_lease_ms=settings.member_lease_ms)
    telemetry = Telemetry(runtime.registry, runtime.hub, catalog)
    expiry = Expiry(catalog, store, telemetry, runtime.random, sweep_ms=settings.member_lease_ms)
    offsets = Peer(runtime.nodes, "offsets", offsets_grpc.OffsetsServiceStub, runtime.connect)
    progress = Progress(offsets.stub)
    servicer = NameserverServicer(settings, catalog, store, telemetry, progress)
    name = pb.DESCRIPTOR.services_by_name["NameserverService"].full_name
    shrinking = Shrinking(
        catalog,
        store,
        offsets.stub,
        runtime.connect,
        interval_ms=settings.shrink_interval_ms,
    )
    try:
        yield App(
            servicers={name: partial(pb_grpc.add_NameserverServiceServicer_to_server, servicer)},
            loops=(*(mirror.run for mirror in catalog.mirrors), expiry.run, shrinking.run),
        )
    finally:
        await offsets.close()


if __name__ == "__main__":
    run("nameserver", NameserverSettings, build)
