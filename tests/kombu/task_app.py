"""A Celery application for tests: its tasks note what they do in tasks.log of the folder."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event
from typing import Any

from celery import Celery, Task

import batonmq.kombu  # noqa: F401  makes the URL scheme known

LOG, GATE = Path("tasks.log"), Path("gate")

app = Celery("tests")
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"queue_count": 4, "requeues_max": 1, "requeue_ms": 200},
)


def note(*words: object) -> None:
    """Append one line; short lines of several processes do not mix."""
    with LOG.open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


@app.task  # type: ignore[untyped-decorator]
def work(name: str) -> None:
    """Do nothing else."""
    note("done", name, os.getpid())


@app.task  # type: ignore[untyped-decorator]
def wait(name: str) -> None:
    """Run until the gate is open."""
    note("began", name, os.getpid())
    pause = Event()
    while not GATE.exists():
        pause.wait(0.02)
    note("done", name, os.getpid())


@app.task(bind=True, max_retries=1)  # type: ignore[untyped-decorator]
def fail_once(self: Task[Any, Any], name: str) -> None:
    """Fail in the first attempt."""
    note("attempt", name, self.request.retries)
    if not self.request.retries:
        raise self.retry(countdown=0.2)
    note("done", name, os.getpid())


@app.task  # type: ignore[untyped-decorator]
def send_child(name: str) -> None:
    """Send another task, from the process of the pool."""
    work.delay(f"{name}-child")
    note("done", name, os.getpid())


@app.task  # type: ignore[untyped-decorator]
def crash(name: str) -> None:
    """End the process of the pool that runs the task."""
    note("began", name, os.getpid())
    os._exit(9)
