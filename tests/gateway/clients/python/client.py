"""The official Python client as a program: takes one task as JSON, prints the result as JSON.

It runs in a process and a virtual environment of its own: its contract and ours can't be in one
process, as both define the same messages.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from time import monotonic, time  # noqa: TID251  this process has nothing of ours

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)
from rocketmq.grpc_protocol import FilterType


def configuration(task):
    credentials = Credentials(task.get("access_key", ""), task.get("secret", ""))
    return ClientConfiguration(task["endpoints"], credentials, task.get("namespace", ""))


def send(task):
    producer = Producer(configuration(task), (task["topic"],), tls_enable=task.get("tls", False))
    producer.startup()
    sent = []
    try:
        for one in task["messages"]:
            message = Message()
            message.topic, message.body = task["topic"], one["body"].encode()
            if "tag" in one:
                message.tag = one["tag"]
            for key in one.get("keys", ()):
                message.keys = key
            if "message_group" in one:
                message.message_group = one["message_group"]
            if "deliver_at_s" in one:
                message.delivery_timestamp = one["deliver_at_s"]
            for name, value in one.get("properties", {}).items():
                message.add_property(name, value)
            receipt = producer.send(message)
            result = {"id": receipt.message_id, "offset": receipt.offset}
            if one.get("recall"):
                handle = receipt.recall_handle
                result["recalled"] = producer.recall_message(task["topic"], handle)
            sent.append(result)
    finally:
        producer.shutdown()
    return {"sent": sent}


def transactions(task):
    """Begin a transaction per message and end it as the message says; answer checks meanwhile."""
    answers, checked = task.get("answers", {}), queue.Queue()

    class Checker(TransactionChecker):
        def check(self, message):
            body = message.body.decode()
            checked.put({"body": body, "id": message.message_id})
            return TransactionResolution.COMMIT if answers[body] else TransactionResolution.ROLLBACK

    producer = Producer(configuration(task), (task["topic"],), checker=Checker())
    producer.startup()
    result = {"checked": [], "sent": []}
    for one in task["messages"]:
        message = Message()
        message.topic, message.body = task["topic"], one["body"].encode()
        transaction = producer.begin_transaction()
        result["sent"].append({"id": producer.send(message, transaction).message_id})
        if one["end"] == "commit":
            transaction.commit()
        elif one["end"] == "rollback":
            transaction.rollback()
    end = monotonic() + task["seconds"]
    while len(result["checked"]) < task.get("checks", 0) and (left := end - monotonic()) > 0:
        result["checked"].append(checked.get(timeout=left))
    if task.get("checks"):
        producer.shutdown()  # the answers to checks leave before; without checks it just dies
    return result


def view(message):
    return {
        "body": message.body.decode(),
        "id": message.message_id,
        "tag": message.tag or "",
        "keys": sorted(message.keys),
        "message_group": message.message_group or "",
        "properties": dict(message.properties),
        "attempt": message.delivery_attempt,
        "at_s": time(),
    }


def subscription(task):
    if "sql" in task:
        return {task["topic"]: FilterExpression(task["sql"], FilterType.SQL)}
    return {task["topic"]: FilterExpression(task.get("filter", "*"))}


def simple(task):
    wanted = subscription(task)
    tls = task.get("tls", False)
    consumer = SimpleConsumer(configuration(task), task["group"], wanted, tls_enable=tls)
    consumer.await_duration = 2
    consumer.startup()
    received, end = [], monotonic() + task["seconds"]
    try:
        while len(received) < task["count"] and monotonic() < end:
            for message in consumer.receive(16, task["invisible_s"]) or ():
                received.append(view(message))
                if task.get("give_back") and message.delivery_attempt == 1:
                    consumer.change_invisible_duration(message, 0)
                elif task.get("ack", True):
                    consumer.ack(message)
    finally:
        consumer.shutdown()
    return {"received": received}


def push(task):
    arrived = queue.Queue()
    failures = dict(task.get("fail", {}))

    class Listener(MessageListener):
        def consume(self, message):
            body = message.body.decode()
            arrived.put(view(message))
            if failures.get(body, 0):
                failures[body] -= 1
                return ConsumeResult.FAILURE
            return ConsumeResult.SUCCESS

    consumer = PushConsumer(configuration(task), task["group"], Listener(), subscription(task))
    consumer.startup()
    received, end = [], monotonic() + task["seconds"]
    try:
        while len(received) < task["count"] and (left := end - monotonic()) > 0:
            try:
                received.append(arrived.get(timeout=left))
            except queue.Empty:
                break
        end = monotonic() + 1  # the acks of the last messages leave before the shutdown
        while (left := end - monotonic()) > 0:
            try:
                received.append(arrived.get(timeout=left))
            except queue.Empty:
                break
    finally:
        consumer.shutdown()
    return {"received": received}


def say(**event):
    print(json.dumps(event), flush=True)


def ended():
    """Return an event that is set when the standard input ends."""
    over = threading.Event()

    def read():
        sys.stdin.read()
        over.set()

    threading.Thread(target=read, daemon=True).start()
    return over


def send_on(task):
    """Send numbered messages until the standard input ends; print the outcome of each."""
    over, number = ended(), 0
    producer = Producer(configuration(task), (task["topic"],))
    producer.startup()
    while not over.wait(task["pause_s"]):
        number += 1
        message = Message()
        message.topic, message.body = task["topic"], str(number).encode()
        try:
            producer.send(message)
        except Exception as error:  # noqa: BLE001  a service is away; it goes on
            say(failed=str(number), error=str(error))
        else:
            say(sent=str(number))
    return {}


def consume_on(task):
    """Receive and acknowledge until the standard input ends; print each event as it happens."""
    over = ended()
    consumer = SimpleConsumer(configuration(task), task["group"], subscription(task))
    consumer.await_duration = 1
    consumer.startup()
    while not over.is_set():
        try:
            received = consumer.receive(16, task["invisible_s"]) or ()
        except Exception as error:  # noqa: BLE001  a service is away; it goes on
            say(error=str(error))
            over.wait(0.1)
            continue
        for message in received:
            body = message.body.decode()
            say(received=body, attempt=message.delivery_attempt)
            try:
                consumer.ack(message)
            except Exception as error:  # noqa: BLE001  the message may come again
                say(unsure=body, error=str(error))
            else:
                say(acknowledged=body)
    return {}


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    operations = {"send": send, "simple": simple, "push": push, "transactions": transactions}
    operations |= {"send_on": send_on, "consume_on": consume_on}
    print(json.dumps(operations[task["op"]](task)), flush=True)
    os._exit(0)  # the client leaves threads behind that keep the process alive
