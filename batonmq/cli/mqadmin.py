"""`baton mqadmin …`: names and flags of RocketMQ's tool, for fingers that know them.

Each does what the command does that its help names, and prints the same. What has no meaning here,
such as the broker a topic is created on, is taken, and told to be ignored.
"""

from __future__ import annotations

import re
import sys
from enum import Enum
from typing import Annotated

import click

from batonmq._common.clock import Clock
from batonmq._core.queues import QueueRef
from batonmq._producer.producer import Producer
from batonmq._producer.settings import ProducerSettings
from batonmq.cli import cluster, group, message, topic
from batonmq.cli.change_options import yes_option, resolve_by
from batonmq.cli.completion import groups_that_begin, topics_that_begin
from batonmq.cli.group_resets import execute_option, reset_offsets
from batonmq.cli.output import Columns
from batonmq.cli.session import CommandSession, local_session, open_session
from batonmq.cli.topic import Permission
from batonmq.cli.topic_stats import stats
from batonmq.errors import TopicNotFound

app = click.Group(
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


namesrv_option = click.option(
    "-n",
    "--namesrvAddr",
    "nameserver",
    metavar="HOST:PORT",
    callback=_addresses,
    help="Nameservers, separated by ; or by commas.",
)
cluster_option = click.option(
    "-c", "--clusterName", "_cluster", default="", callback=_ignored, help="Ignored."
)
broker_option = click.option(
    "-b", "--brokerAddr", "_broker", default="", callback=_ignored, help="Ignored."
)
# TODO names/defaults {('name', None), ('topic', '""'), ('topic_name', None)}
topic_option = click.option(
    "-t", "--topic", "name", default="", shell_complete=topics_that_begin, help="The topic."
)
group_option = click.option(
    "-g", "--groupName", "name", default="", shell_complete=groups_that_begin, help="The group."
)
_SENT_COLUMNS: Columns = {
    "BROKER": "broker",
    "QUEUE": "queue_id",
    "OFFSET": "offset",
    "DURABILITY": "durability",
    "MESSAGE-ID": "message_id",
}


@app.command("updateTopic")
@topic_option
@click.option(
    "-r",
    "--readQueueNums",
    "read",
    type=click.IntRange(min=1),
    help="Queues, of all brokers together; 8 if it is new.",
)
@click.option(
    "-w", "--writeQueueNums", "write", type=click.IntRange(min=1), help="The same, if given."
)
@click.option(
    "-p",
    "--perm",
    type=click.Choice(["2", "4", "6"]),
    help="2 write, 4 read, 6 both; 6 if it is new.",
)
@cluster_option
@broker_option
@namesrv_option
@local_session
def update_topic(
    session: CommandSession,
    name: str,
    read: int | None,
    write: int | None,
    perm: str | None,
    _cluster: str,
    _broker: str,
    nameserver: str | None,
) -> None:
    """Equals: baton topic create, or baton topic update if the topic is there."""
    if read and write and read != write:
        raise click.UsageError("-r and -w have to be the same: a queue is read and written")
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
@topic_option
@yes_option
@cluster_option
@namesrv_option
@local_session
def delete_topic(
    session: CommandSession, name: str, yes: bool, _cluster: str, nameserver: str | None
) -> None:
    """Equals: baton topic delete TOPIC. Asks first, unless --yes is given."""
    topic.delete(context, name, yes=yes, nameserver=nameserver, form=form)


@app.command("topicList")
@cluster_option
@namesrv_option
@local_session
def topic_list(session: CommandSession, _cluster: str, nameserver: str | None) -> None:
    """Equals: baton topic list."""
    topic.list_(context, nameserver=nameserver, form=form)


@app.command("topicStatus")
@topic_option
@namesrv_option
@local_session
def topic_status(session: CommandSession, name: str, nameserver: str | None) -> None:
    """Equals: baton topic stats TOPIC."""
    stats(context, name, nameserver=nameserver, form=form)


@app.command("topicRoute")
@topic_option
@namesrv_option
@local_session
def topic_route(session: CommandSession, name: str, nameserver: str | None) -> None:
    """Equals: baton topic describe TOPIC."""
    topic.describe(context, name, nameserver=nameserver, form=form)


@app.command("clusterList")
@cluster_option
@namesrv_option
@local_session
def cluster_list(session: CommandSession, _cluster: str, nameserver: str | None) -> None:
    """Equals: baton cluster status."""
    cluster.status(context, nameserver=nameserver, form=form)


@app.command("consumerProgress")
@group_option
@namesrv_option
@local_session
def consumer_progress(session: CommandSession, name: str, nameserver: str | None) -> None:
    """Equals: baton group describe GROUP; without -g: baton group list."""
    if name:
        group.describe(context, name, nameserver=nameserver, form=form)
    else:
        group.list_(context, nameserver=nameserver, form=form)


@app.command("consumerConnection")
@group_option
@namesrv_option
@local_session
def consumer_connection(session: CommandSession, name: str, nameserver: str | None) -> None:
    """Equals: baton group members GROUP."""
    group.members(context, name, nameserver=nameserver, form=form)


@app.command("resetOffsetByTime")
@group_option
@topic_option
@click.option(
    "-s",
    "--timestamp",
    "time",
    required=True,
    help="now, Unix milliseconds, or yyyy-MM-dd#HH:mm:ss:SSS in UTC.",
)
@execute_option
@namesrv_option
@local_session
def reset_offset_by_time(
    session: CommandSession,
    name: str,
    topic_name: str,
    time: str,
    execute: bool,
    nameserver: str | None,
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
@group_option
@yes_option
@cluster_option
@broker_option
@namesrv_option
@local_session
def delete_sub_group(
    session: CommandSession,
    name: str,
    yes: bool,
    _cluster: str,
    _broker: str,
    nameserver: str | None,
) -> None:
    """Equals: baton group delete GROUP. Asks first, unless --yes is given."""
    group.delete(context, name, yes=yes, nameserver=nameserver, form=form)


@app.command("queryMsgById")
@click.option("-i", "--msgId", "message_id", required=True, help="Id of the message.")
@namesrv_option
@local_session
def query_msg_by_id(session: CommandSession, message_id: str, nameserver: str | None) -> None:
    """Equals: baton message get ID."""
    message.get(context, message_id, nameserver=nameserver, form=form)


@app.command("queryMsgByKey")
@topic_option
@click.option("-k", "--msgKey", "key", required=True, help="Key of the messages.")
@click.option(
    "-m",
    "--maxNum",
    "count",
    default=64,
    show_default=True,
    type=click.IntRange(min=1, max=1_000),
    help="At most so many.",
)
@namesrv_option
@local_session
def query_msg_by_key(
    session: CommandSession, name: str, key: str, count: int, nameserver: str | None
) -> None:
    """Equals: baton message get --topic TOPIC --key KEY."""
    message.get(context, None, topic=name, key=key, count=count, nameserver=nameserver, form=form)


@app.command("queryMsgByOffset")
@topic_option
@click.option("-b", "--brokerName", "broker", required=True, help="Broker of the queue.")
@click.option(
    "-i",
    "--queueId",
    "queue_id",
    required=True,
    type=click.IntRange(min=0),
    help="Index of the queue.",
)
@click.option(
    "-o", "--offset", required=True, type=click.IntRange(min=0), help="Offset in the queue."
)
@namesrv_option
@local_session
def query_msg_by_offset(
    session: CommandSession,
    name: str,
    broker: str,
    queue_id: int,
    offset: int,
    nameserver: str | None,
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
@topic_option
@click.option("-p", "--body", required=True, help="Body of the message, as UTF-8.")
@click.option("-k", "--keys", default="", help="Separated by spaces.")
@click.option("-c", "--tags", "tag", default="", help="Its tag.")
@click.option("-b", "--broker", default="", help="With -i: to this queue.")
@click.option("-i", "--qid", "queue_id", type=click.IntRange(min=0), help="With -b: to this queue.")
@namesrv_option
@local_session
def send_message(
    session: CommandSession,
    name: str,
    body: str,
    keys: str,
    tag: str,
    broker: str,
    queue_id: int | None,
    nameserver: str | None,
) -> None:
    """Equals: baton produce TOPIC, with the body on standard input."""
    if (queue_id is None) == bool(broker):
        raise click.UsageError("-b and -i name a queue together")
    queue = None if queue_id is None else QueueRef(name, broker, queue_id)
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
