"""`baton mqadmin …`: names and flags of RocketMQ's tool, for fingers that know them.

Each does what the command does that its help names, and prints the same. What has no meaning here,
such as the broker a topic is created on, is taken, and told to be ignored.
"""

from __future__ import annotations

import re
import sys
from enum import Enum
from typing import Annotated

import typer

from batonmq._common.clock import Clock
from batonmq._core.queues import QueueRef
from batonmq._producer.producer import Producer
from batonmq._producer.settings import ProducerSettings
from batonmq.cli import cluster, group, message, topic
from batonmq.cli.change_options import YesOption, resolve_by
from batonmq.cli.completion import groups_that_begin, topics_that_begin
from batonmq.cli.group_resets import ExecuteOption, reset_offsets
from batonmq.cli.output import Columns
from batonmq.cli.session import CommandSession, FormatOption, open_session
from batonmq.cli.topic import Permission
from batonmq.cli.topic_stats import stats
from batonmq.errors import TopicNotFound

app = typer.Typer(
    help="The commonest commands of RocketMQ's mqadmin, by their names and flags.",
    no_args_is_help=True,
)


class Perm(Enum):
    """What may be done with a topic, in RocketMQ's numbers."""

    WRITE = "2"
    READ = "4"
    READ_WRITE = "6"


def _addresses(value: str | None) -> str | None:
    return value.replace(";", ",") if value else value


def _ignored(parameter: typer.CallbackParam, value: str) -> str:
    if value:
        print(f"{parameter.opts[0]} is ignored: it has no meaning here", file=sys.stderr)
    return value


NamesrvOption = Annotated[
    str | None,
    typer.Option(
        "-n",
        "--namesrvAddr",
        metavar="HOST:PORT",
        help="Nameservers, separated by ; or by commas.",
        show_default=False,
        callback=_addresses,
    ),
]
ClusterOption = Annotated[
    str, typer.Option("-c", "--clusterName", help="Ignored.", callback=_ignored)
]
BrokerOption = Annotated[
    str, typer.Option("-b", "--brokerAddr", help="Ignored.", callback=_ignored)
]
TopicOption = Annotated[
    str, typer.Option("-t", "--topic", help="The topic.", autocompletion=topics_that_begin)
]
GroupOption = Annotated[
    str, typer.Option("-g", "--groupName", help="The group.", autocompletion=groups_that_begin)
]
_SENT_COLUMNS: Columns = {
    "BROKER": "broker",
    "QUEUE": "queue_id",
    "OFFSET": "offset",
    "DURABILITY": "durability",
    "MESSAGE-ID": "message_id",
}


@app.command("updateTopic")
def update_topic(
    context: typer.Context,
    name: TopicOption,
    *,
    read: Annotated[
        int | None,
        typer.Option(
            "-r", "--readQueueNums", min=1, help="Queues, of all brokers together; 8 if it is new."
        ),
    ] = None,
    write: Annotated[
        int | None, typer.Option("-w", "--writeQueueNums", min=1, help="The same, if given.")
    ] = None,
    perm: Annotated[
        Perm | None, typer.Option("-p", "--perm", help="2 write, 4 read, 6 both; 6 if it is new.")
    ] = None,
    _cluster: ClusterOption = "",
    _broker: BrokerOption = "",
    nameserver: NamesrvOption = None,
    form: FormatOption = None,
) -> None:
    """Equals: baton topic create, or baton topic update if the topic is there."""
    if read and write and read != write:
        raise typer.BadParameter("-r and -w have to be the same: a queue is read and written")
    session = open_session(context, nameserver, form)
    queues = read or write
    if not session.run(_exists(session, name)):
        topic.create(context, name, queues=queues or 8, nameserver=nameserver, form=form)
        queues = None
    if queues or perm:
        permission = Permission[perm.name] if perm else None
        topic.update(
            context, name, queues=queues, permission=permission, nameserver=nameserver, form=form
        )


async def _exists(session: CommandSession, name: str) -> bool:
    async with session.admin() as admin:
        try:
            await admin.describe_topic(name)
        except TopicNotFound:
            return False
    return True


@app.command("deleteTopic")
def delete_topic(
    context: typer.Context,
    name: TopicOption,
    *,
    yes: YesOption = False,
    _cluster: ClusterOption = "",
    nameserver: NamesrvOption = None,
    form: FormatOption = None,
) -> None:
    """Equals: baton topic delete TOPIC. Asks first, unless --yes is given."""
    topic.delete(context, name, yes=yes, nameserver=nameserver, form=form)


@app.command("topicList")
def topic_list(
    context: typer.Context,
    *,
    _cluster: ClusterOption = "",
    nameserver: NamesrvOption = None,
    form: FormatOption = None,
) -> None:
    """Equals: baton topic list."""
    topic.list_(context, nameserver=nameserver, form=form)


@app.command("topicStatus")
def topic_status(
    context: typer.Context,
    name: TopicOption,
    *,
    nameserver: NamesrvOption = None,
    form: FormatOption = None,
) -> None:
    """Equals: baton topic stats TOPIC."""
    stats(context, name, nameserver=nameserver, form=form)


@app.command("topicRoute")
def topic_route(
    context: typer.Context,
    name: TopicOption,
    *,
    nameserver: NamesrvOption = None,
    form: FormatOption = None,
) -> None:
    """Equals: baton topic describe TOPIC."""
    topic.describe(context, name, nameserver=nameserver, form=form)


@app.command("clusterList")
def cluster_list(
    context: typer.Context,
    *,
    _cluster: ClusterOption = "",
    nameserver: NamesrvOption = None,
    form: FormatOption = None,
) -> None:
    """Equals: baton cluster status."""
    cluster.status(context, nameserver=nameserver, form=form)


@app.command("consumerProgress")
def consumer_progress(
    context: typer.Context,
    *,
    name: GroupOption = "",
    nameserver: NamesrvOption = None,
    form: FormatOption = None,
) -> None:
    """Equals: baton group describe GROUP; without -g: baton group list."""
    if name:
        group.describe(context, name, nameserver=nameserver, form=form)
    else:
        group.list_(context, nameserver=nameserver, form=form)


@app.command("consumerConnection")
def consumer_connection(
    context: typer.Context,
    name: GroupOption,
    *,
    nameserver: NamesrvOption = None,
    form: FormatOption = None,
) -> None:
    """Equals: baton group members GROUP."""
    group.members(context, name, nameserver=nameserver, form=form)


@app.command("resetOffsetByTime")
def reset_offset_by_time(
    context: typer.Context,
    name: GroupOption,
    topic_name: TopicOption,
    *,
    time: Annotated[
        str,
        typer.Option(
            "-s", "--timestamp", help="now, Unix milliseconds, or yyyy-MM-dd#HH:mm:ss:SSS in UTC."
        ),
    ],
    execute: ExecuteOption = False,
    nameserver: NamesrvOption = None,
    form: FormatOption = None,
) -> None:
    """Equals: baton group reset-offsets GROUP --topic TOPIC --to-datetime TIME."""
    to_datetime = str(Clock().unix_ms()) if time == "now" else iso_time(time)
    reset_offsets(
        context,
        name,
        topic=topic_name,
        to_datetime=to_datetime,
        execute=execute,
        reason="mqadmin resetOffsetByTime",
        by=resolve_by(context, ""),
        nameserver=nameserver,
        form=form,
    )


def iso_time(text: str) -> str:
    """RocketMQ's form of a time, such as 2026-01-31#08:00:00:000, as everybody else's."""
    return re.sub(r"^(\d{4}-\d\d-\d\d)#(\d\d:\d\d:\d\d):(\d{3})$", r"\1T\2.\3", text)


@app.command("deleteSubGroup")
def delete_sub_group(
    context: typer.Context,
    name: GroupOption,
    *,
    yes: YesOption = False,
    _cluster: ClusterOption = "",
    _broker: BrokerOption = "",
    nameserver: NamesrvOption = None,
    form: FormatOption = None,
) -> None:
    """Equals: baton group delete GROUP. Asks first, unless --yes is given."""
    group.delete(context, name, yes=yes, nameserver=nameserver, form=form)


@app.command("queryMsgById")
def query_msg_by_id(
    context: typer.Context,
    message_id: Annotated[str, typer.Option("-i", "--msgId", help="Id of the message.")],
    *,
    nameserver: NamesrvOption = None,
    form: FormatOption = None,
) -> None:
    """Equals: baton message get ID."""
    message.get(context, message_id, nameserver=nameserver, form=form)


@app.command("queryMsgByKey")
def query_msg_by_key(
    context: typer.Context,
    name: TopicOption,
    key: Annotated[str, typer.Option("-k", "--msgKey", help="Key of the messages.")],
    *,
    count: Annotated[
        int, typer.Option("-m", "--maxNum", min=1, max=1_000, help="At most so many.")
    ] = 64,
    nameserver: NamesrvOption = None,
    form: FormatOption = None,
) -> None:
    """Equals: baton message get --topic TOPIC --key KEY."""
    message.get(context, None, topic=name, key=key, count=count, nameserver=nameserver, form=form)


@app.command("queryMsgByOffset")
def query_msg_by_offset(
    context: typer.Context,
    name: TopicOption,
    broker: Annotated[str, typer.Option("-b", "--brokerName", help="Broker of the queue.")],
    queue_id: Annotated[int, typer.Option("-i", "--queueId", min=0, help="Index of the queue.")],
    offset: Annotated[int, typer.Option("-o", "--offset", min=0, help="Offset in the queue.")],
    *,
    nameserver: NamesrvOption = None,
    form: FormatOption = None,
) -> None:
    """Equals: baton message get --topic TOPIC --broker BROKER --queue ID --offset OFFSET."""
    message.get(
        context,
        None,
        topic=name,
        broker=broker,
        queue=queue_id,
        offset=offset,
        nameserver=nameserver,
        form=form,
    )


@app.command("sendMessage")
def send_message(
    context: typer.Context,
    name: TopicOption,
    body: Annotated[str, typer.Option("-p", "--body", help="Body of the message, as UTF-8.")],
    *,
    keys: Annotated[str, typer.Option("-k", "--keys", help="Separated by spaces.")] = "",
    tag: Annotated[str, typer.Option("-c", "--tags", help="Its tag.")] = "",
    broker: Annotated[str, typer.Option("-b", "--broker", help="With -i: to this queue.")] = "",
    queue_id: Annotated[
        int | None, typer.Option("-i", "--qid", min=0, help="With -b: to this queue.")
    ] = None,
    nameserver: NamesrvOption = None,
    form: FormatOption = None,
) -> None:
    """Equals: baton produce TOPIC, with the body on standard input."""
    if (queue_id is None) == bool(broker):
        raise typer.BadParameter("-b and -i name a queue together")
    queue = None if queue_id is None else QueueRef(name, broker, queue_id)
    session = open_session(context, nameserver, form)
    session.run(_send(session, name, body.encode(), tag, keys.split(), queue))


async def _send(
    session: CommandSession,
    name: str,
    body: bytes,
    tag: str,
    keys: list[str],
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
