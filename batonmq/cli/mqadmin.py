"""`baton mqadmin …`: commands with the names and flags of RocketMQ's tool.

Each command does what the command named in its help does, and prints the same. Flags without a
meaning in BatonMQ, such as the broker that a topic is created on, are accepted and ignored.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import click

from batonmq._common.clock import Clock
from batonmq._core.queues import QueueRef
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.cli import cluster, group, message, topic
from batonmq.cli.arguments import OFFSET, QUEUE_ID
from batonmq.cli.change_options import yes_option
from batonmq.cli.command_classes import LazyGroup
from batonmq.cli.completion import complete_groups, complete_topics
from batonmq.cli.group_resets import execute_option, reset_offsets
from batonmq.cli.output import Columns
from batonmq.cli.session import CommandSession, format_option, open_session
from batonmq.cli.topic_stats import stats
from batonmq.errors import TopicNotFound

commands = LazyGroup(
    "mqadmin",
    help="Common commands of RocketMQ's mqadmin, with their names and flags.",
    no_args_is_help=True,
)
_PERMISSIONS = {"2": "w", "4": "r", "6": "rw"}
"""RocketMQ's numbers to the values of `baton topic update --permission`."""
_SENT_COLUMNS: Columns = {
    "BROKER": "broker",
    "QUEUE": "queue_id",
    "OFFSET": "offset",
    "DURABILITY": "durability",
    "MESSAGE-ID": "message_id",
}


def _with_commas(_: click.Context, __: click.Parameter, addresses: str | None) -> str | None:
    return addresses.replace(";", ",") if addresses else addresses


def _warn_ignored(_: click.Context, parameter: click.Parameter, value: str) -> str:
    if value:
        print(f"{parameter.opts[0]} is ignored: it has no meaning in BatonMQ", file=sys.stderr)
    return value


namesrv_option = click.option(
    "-n",
    "--namesrvAddr",
    "nameserver",
    metavar="HOST:PORT",
    callback=_with_commas,
    help="Addresses of nameservers, separated by semicolons or commas.",
)
cluster_option = click.option(
    "-c", "--clusterName", expose_value=False, callback=_warn_ignored, help="Ignored."
)
broker_option = click.option(
    "-b", "--brokerAddr", expose_value=False, callback=_warn_ignored, help="Ignored."
)
topic_option = click.option(
    "-t",
    "--topic",
    "topic_name",
    required=True,
    shell_complete=complete_topics,
    help="Name of the topic.",
)
group_option = click.option(
    "-g",
    "--groupName",
    "group_name",
    required=True,
    shell_complete=complete_groups,
    help="Name of the group.",
)


def mqadmin_session(function: Callable[..., None]) -> Callable[..., None]:
    """Add -n and --format to a command, and pass a session as its first argument."""

    @wraps(function)
    def run(nameserver: str | None, form: str | None, **options: Any) -> None:
        function(open_session(click.get_current_context(), nameserver, form), **options)

    return namesrv_option(format_option(run))


def _forward(
    session: CommandSession, command: click.Command, *arguments: str, **options: str | int | None
) -> None:
    """Run another command of `baton` in the same session, as if it had been typed.

    So its values are converted and checked as on its own command line.

    Args:
        options: By the name of the option, with underscores; True for a flag. None and False are
            left out.

    Raises:
        click.UsageError: a value is not allowed; the message names the option of that command.
    """
    options |= {"nameserver": session.nameserver, "format": session.output.form.value}
    line = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            line.append(option)
        elif value is not None and value is not False:
            line.append(f"{option}={value}")
    context = click.get_current_context()
    typed = [*line, "--", *arguments]
    with command.make_context(context.info_name, typed, context.parent) as forwarded:
        command.invoke(forwarded)


@commands.command("updateTopic")
@topic_option
@click.option(
    "-r",
    "--readQueueNums",
    "read",
    type=click.IntRange(min=1),
    help="Number of queues on all brokers together; 8 for a new topic.",
)
@click.option(
    "-w", "--writeQueueNums", "write", type=click.IntRange(min=1), help="The same number, if given."
)
@click.option(
    "-p",
    "--perm",
    type=click.Choice(list(_PERMISSIONS)),
    help="2 write, 4 read, 6 both; 6 for a new topic.",
)
@cluster_option
@broker_option
@mqadmin_session
def update_topic(
    session: CommandSession, topic_name: str, read: int | None, write: int | None, perm: str | None
) -> None:
    """Equals: baton topic create, or baton topic update if the topic exists."""
    if read and write and read != write:
        raise click.UsageError("-r and -w must be equal: every queue is read and written")
    queues = read or write
    if not session.run(_exists(session, topic_name)):
        _forward(session, topic.create, topic_name, queues=queues or 8)
        queues = None
    if queues or perm:
        permission = _PERMISSIONS[perm] if perm else None
        _forward(session, topic.update, topic_name, queues=queues, permission=permission)


async def _exists(session: CommandSession, name: str) -> bool:
    async with session.admin() as admin:
        try:
            await admin.describe_topic(name)
        except TopicNotFound:
            return False
    return True


@commands.command("deleteTopic")
@topic_option
@yes_option
@cluster_option
@mqadmin_session
def delete_topic(session: CommandSession, topic_name: str, yes: bool) -> None:
    """Equals: baton topic delete TOPIC. Asks for confirmation, unless --yes is given."""
    _forward(session, topic.delete, topic_name, yes=yes)


@commands.command("topicList")
@cluster_option
@mqadmin_session
def topic_list(session: CommandSession) -> None:
    """Equals: baton topic list."""
    _forward(session, topic.list_)


@commands.command("topicStatus")
@topic_option
@mqadmin_session
def topic_status(session: CommandSession, topic_name: str) -> None:
    """Equals: baton topic stats TOPIC."""
    _forward(session, stats, topic_name)


@commands.command("topicRoute")
@topic_option
@mqadmin_session
def topic_route(session: CommandSession, topic_name: str) -> None:
    """Equals: baton topic describe TOPIC."""
    _forward(session, topic.describe, topic_name)


@commands.command("clusterList")
@cluster_option
@mqadmin_session
def cluster_list(session: CommandSession) -> None:
    """Equals: baton cluster status."""
    _forward(session, cluster.status)


@commands.command("consumerProgress")
@click.option(
    "-g",
    "--groupName",
    "group_name",
    default="",
    shell_complete=complete_groups,
    help="Name of the group; by default all groups.",
)
@mqadmin_session
def consumer_progress(session: CommandSession, group_name: str) -> None:
    """Equals: baton group describe GROUP; without -g: baton group list."""
    if group_name:
        _forward(session, group.describe, group_name)
    else:
        _forward(session, group.list_)


@commands.command("consumerConnection")
@group_option
@mqadmin_session
def consumer_connection(session: CommandSession, group_name: str) -> None:
    """Equals: baton group members GROUP."""
    _forward(session, group.members, group_name)


@commands.command("resetOffsetByTime")
@group_option
@topic_option
@click.option(
    "-s",
    "--timestamp",
    required=True,
    help="now, Unix milliseconds, or yyyy-MM-dd#HH:mm:ss:SSS in UTC.",
)
@execute_option
@mqadmin_session
def reset_offset_by_time(
    session: CommandSession, group_name: str, topic_name: str, timestamp: str, execute: bool
) -> None:
    """Equals: baton group reset-offsets GROUP --topic TOPIC --to-datetime TIME."""
    to_datetime = str(Clock().unix_ms()) if timestamp == "now" else iso_time(timestamp)
    _forward(
        session,
        reset_offsets,
        group_name,
        topic=topic_name,
        to_datetime=to_datetime,
        execute=execute,
        reason="mqadmin resetOffsetByTime",
    )


def iso_time(text: str) -> str:
    """Return a time in RocketMQ's form, such as 2026-01-31#08:00:00:000, in ISO 8601."""
    return re.sub(r"^(\d{4}-\d\d-\d\d)#(\d\d:\d\d:\d\d):(\d{3})$", r"\1T\2.\3", text)


@commands.command("deleteSubGroup")
@group_option
@yes_option
@cluster_option
@broker_option
@mqadmin_session
def delete_sub_group(session: CommandSession, group_name: str, yes: bool) -> None:
    """Equals: baton group delete GROUP. Asks for confirmation, unless --yes is given."""
    _forward(session, group.delete, group_name, yes=yes)


@commands.command("queryMsgById")
@click.option("-i", "--msgId", "message_id", required=True, help="Id of the message.")
@mqadmin_session
def query_msg_by_id(session: CommandSession, message_id: str) -> None:
    """Equals: baton message get ID."""
    _forward(session, message.get, message_id)


@commands.command("queryMsgByKey")
@topic_option
@click.option("-k", "--msgKey", "key", required=True, help="Key of the messages.")
@click.option(
    "-m",
    "--maxNum",
    "count",
    default=64,
    show_default=True,
    type=click.IntRange(min=1, max=1_000),
    help="Maximum number of messages to show.",
)
@mqadmin_session
def query_msg_by_key(session: CommandSession, topic_name: str, key: str, count: int) -> None:
    """Equals: baton message get --topic TOPIC --key KEY."""
    _forward(session, message.get, topic=topic_name, key=key, count=count)


@commands.command("queryMsgByOffset")
@topic_option
@click.option("-b", "--brokerName", "broker", required=True, help="Broker of the queue.")
@click.option("-i", "--queueId", "queue", required=True, type=QUEUE_ID, help="Id of the queue.")
@click.option("-o", "--offset", required=True, type=OFFSET, help="Offset in the queue.")
@mqadmin_session
def query_msg_by_offset(
    session: CommandSession, topic_name: str, broker: str, queue: int, offset: int
) -> None:
    """Equals: baton message get --topic TOPIC --queue BROKER/ID --offset OFFSET."""
    _forward(session, message.get, topic=topic_name, queue=f"{broker}/{queue}", offset=offset)


@commands.command("sendMessage")
@topic_option
@click.option("-p", "--body", required=True, help="Body of the message, in UTF-8.")
@click.option("-k", "--keys", default="", help="Keys of the message, separated by spaces.")
@click.option("-c", "--tags", "tag", default="", help="Tag of the message.")
@click.option("-b", "--broker", default="", help="Broker of the queue; needs -i.")
@click.option("-i", "--qid", "queue_id", type=QUEUE_ID, help="Id of the queue; needs -b.")
@mqadmin_session
def send_message(
    session: CommandSession,
    topic_name: str,
    body: str,
    keys: str,
    tag: str,
    broker: str,
    queue_id: int | None,
) -> None:
    """Equals: baton produce TOPIC, with the body on standard input."""
    if (queue_id is None) == bool(broker):
        raise click.UsageError("-b and -i must be given together")
    queue = None if queue_id is None else QueueRef(topic_name, broker, queue_id)
    session.run(_send(session, topic_name, body.encode(), tag, keys.split(), queue))


async def _send(
    session: CommandSession,
    name: str,
    body: bytes,
    tag: str,
    keys: Sequence[str],
    queue: QueueRef | None,
) -> None:
    settings = ProducerSettings(security=session.security)
    async with Producer(session.nameserver, settings) as producer:
        receipt = await producer.send(name, body, tag=tag, keys=keys, queue=queue)
    item = {
        "topic": name,
        "broker": receipt.queue.broker,
        "queue_id": receipt.queue.queue_id,
        "offset": receipt.offset,
        "message_id": receipt.message_id,
        "durability": receipt.durability.name,
    }
    session.output.detail(item, [item], _SENT_COLUMNS)
