"""Access rules of the gateway.

With access control on, the gateway does not start: it does not check the credentials of its clients
yet, and its clients would act with its own rights.
"""

from __future__ import annotations

from batonmq_server.runtime.access.permissions import ANY_GRANT
from batonmq_server.runtime.access.rules import AccessRules, requires, rules_by_path

METHODS = (
    "QueryRoute", "Heartbeat", "SendMessage", "QueryAssignment", "ReceiveMessage", "AckMessage",
    "ForwardMessageToDeadLetterQueue", "PullMessage", "UpdateOffset", "GetOffset", "QueryOffset",
    "EndTransaction", "Telemetry", "NotifyClientTermination", "ChangeInvisibleDuration",
    "RecallMessage", "SyncLiteSubscription",
)  # fmt: skip
RULES: AccessRules = rules_by_path(
    "apache.rocketmq.v2.MessagingService", dict.fromkeys(METHODS, requires(ANY_GRANT))
)
