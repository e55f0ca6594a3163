"""Settings that a client gets in answer to its own: its own, with what the server decides."""

from __future__ import annotations

from apache.rocketmq.v2 import definition_pb2 as pb
from batonmq._core.records import BODY_BYTES_MAX
from batonmq_server.gateway.message_proto import duration

SETTINGS_BYTES_MAX = 256 * 1024
"""Greatest size of settings: they are answered as a whole, and pushed again."""
RECEIVE_BATCH = 32
_FIRST_MS, _MAX_MS, _MULTIPLIER = 1_000, 120_000, 2.0
_DOUBLINGS_MAX = 7
"""So many reach the greatest delay."""
_CUSTOMIZED_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1_200, 1_800)


def retry_ms(attempt: int, asked_ms: int) -> int:
    """Return how long a message is invisible that a push consumer gives back.

    Less than the first delay of the settings is a fault of the client: that of Node.js takes their
    seconds as milliseconds. The message would use up its attempts at once.

    Args:
        attempt: Deliveries of the message so far.
        asked_ms: What the client asks for.
    """
    if asked_ms >= _FIRST_MS:
        return asked_ms
    return min(_MAX_MS, int(_FIRST_MS * _MULTIPLIER ** min(attempt - 1, _DOUBLINGS_MAX)))


def settings_for(
    sent: pb.Settings, *, attempts_max: int, polling_ms: int, fifo: bool
) -> pb.Settings:
    """Return the settings of a client.

    Args:
        attempts_max: Deliveries of a message before it is a dead letter.
        polling_ms: Longest wait of a receive call.
        fifo: Whether the group of a push consumer works in FIFO mode.
    """
    answer = pb.Settings()
    answer.CopyFrom(sent)
    answer.metric.on = False
    producer = sent.WhichOneof("pub_sub") == "publishing"
    if producer:
        # Without a limit both measured clients refuse to send.
        answer.publishing.max_body_size = BODY_BYTES_MAX
        answer.publishing.validate_message_type = True
        attempts_max = sent.backoff_policy.max_attempts or 3
    elif sent.WhichOneof("pub_sub") == "subscription":
        answer.subscription.fifo = fifo
        answer.subscription.receive_batch_size = RECEIVE_BATCH
        answer.subscription.long_polling_timeout.CopyFrom(duration(polling_ms))
    policy = answer.backoff_policy
    policy.Clear()
    policy.max_attempts = attempts_max
    if sent.user_agent.language == pb.PYTHON and not producer:
        # The Python client ignores exponential delays; Node ignores customized ones, and its
        # producers end their process at them.
        policy.customized_backoff.next.extend(duration(each * 1_000) for each in _CUSTOMIZED_S)
    else:
        policy.exponential_backoff.initial.CopyFrom(duration(_FIRST_MS))
        policy.exponential_backoff.max.CopyFrom(duration(_MAX_MS))
        policy.exponential_backoff.multiplier = _MULTIPLIER
    return answer
