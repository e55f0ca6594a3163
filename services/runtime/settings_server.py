"""The gRPC service that tells with which settings a process runs, and its state."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import grpc.aio

from baton.settings.v1 import settings_service_pb2 as pb
from baton.settings.v1 import settings_service_pb2_grpc as pb_grpc
from batonmq._process.settings_help import SettingHelp

MASKED = "(masked)"
_SECRET = re.compile(r"(passw|secret|credential|token|api_?key|private_?key)(?!.*_(file|ms|s)$)")
_USER_INFO = re.compile(r"(://)[^/@\s]+@")


class SettingsServicer(pb_grpc.SettingsServiceServicer):
    """Answers with the settings that were read at the start of the process, and its state.

    Attributes:
        state: Returns the state of the process; None before the process serves.
    """

    def __init__(self, service: str, node_id: str, settings: Sequence[SettingHelp]) -> None:
        self.state: Callable[[], pb.ProcessState] | None = None
        self._settings = pb.DescribeResponse(
            service=service, node_id=node_id, settings=map(setting_to_pb, settings)
        )

    async def Describe(
        self,
        request: pb.DescribeRequest,
        context: grpc.aio.ServicerContext[pb.DescribeRequest, pb.DescribeResponse],
    ) -> pb.DescribeResponse:
        """See the proto."""
        answer = pb.DescribeResponse()
        answer.CopyFrom(self._settings)
        if self.state is not None:
            answer.process.CopyFrom(self.state())
        return answer


def setting_to_pb(setting: SettingHelp) -> pb.Setting:
    """Return one setting; a secret is masked, and so are user and password in a URL.

    The path of a file with a secret is no secret.
    """
    value = setting.value or ""
    if value and _SECRET.search(setting.name):
        value = MASKED
    return pb.Setting(
        name=setting.name,
        variable=setting.variable,
        unit=setting.unit,
        default_value=setting.default,
        allowed=setting.allowed,
        meaning=setting.meaning,
        value=_USER_INFO.sub(rf"\1{MASKED}@", value),
        source=setting.source,
    )


def add_settings(servicer: SettingsServicer, server: grpc.aio.Server) -> None:
    """Add the service to a server."""
    pb_grpc.add_SettingsServiceServicer_to_server(servicer, server)
