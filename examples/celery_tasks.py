"""Tasks of Celery: a worker is killed in the middle, and another one runs what is left.

    baton up                                   # in another terminal
    python examples/celery_tasks.py [NAMESERVER]

NAMESERVER is $BATON_NAMESERVER by default, or else 127.0.0.1:9876. The first worker dies with a
task that it has not acknowledged. The second one gets the queues at once, runs that task again, and
the others that wait, among them one with a countdown. What the first one has acknowledged does not
run again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from celery import Celery

import batonmq.kombu  # noqa: F401  makes the URL scheme known

NAMESERVER = os.environ.get("BATON_NAMESERVER", "127.0.0.1:9876")
COUNT, LIMIT_S = 20, 60
LOG = Path(os.environ.get("TASKS_LOG", "tasks.log"))

app = Celery("celery_tasks", broker=f"batonmq://{NAMESERVER}")
app.conf.update(
    task_acks_late=True,  # else Celery acknowledges a task before it runs
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    task_default_queue="celery-tasks",
    broker_connection_retry_on_startup=True,
)


@app.task  # type: ignore[untyped-decorator]
def bill(order: int) -> None:
    """Note the order; the first attempt at number 7 hangs."""
    with LOG.open("a") as file:
        file.write(f"{order}\n")
    if order == 7 and handled()[7] == 1:
        time.sleep(LIMIT_S)


def handled() -> Counter[int]:
    """Return how often each order was noted."""
    return Counter(map(int, LOG.read_text().split())) if LOG.exists() else Counter()


def start_worker(nameserver: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a worker with one task at a time."""
    here = Path(__file__)
    command = [sys.executable, "-m", "celery", "-A", here.stem, "worker", "-P", "solo"]
    environment = {**os.environ, "BATON_NAMESERVER": nameserver, "TASKS_LOG": str(log)}
    return subprocess.Popen(
        [*command, "--loglevel", "warning"],
        cwd=here.parent,
        env=environment,
        stderr=subprocess.PIPE,
    )


def wait_until(orders: set[int]) -> None:
    """Return when all these orders were noted."""
    begin_s = time.monotonic()
    while not orders <= handled().keys():
        if time.monotonic() - begin_s > LIMIT_S:
            sys.exit(f"after {LIMIT_S} s only {sorted(handled())} were billed")
        time.sleep(0.05)


def main(nameserver: str = NAMESERVER) -> None:
    """Send orders, kill the first worker, and check what the second one does."""
    global LOG  # noqa: PLW0603  tasks of this process use it, too
    LOG = Path(tempfile.mkdtemp(prefix="celery-tasks-")) / "tasks.log"
    with Celery("sender", broker=f"batonmq://{nameserver}", set_as_current=False) as sender:
        for order in range(COUNT):
            sender.send_task(bill.name, (order,), queue="celery-tasks")
        sender.send_task(bill.name, (COUNT,), queue="celery-tasks", countdown=1)
        first = start_worker(nameserver, LOG)
        wait_until({7})
        first.kill()
        first.wait()
        second = start_worker(nameserver, LOG)
        wait_until(set(range(COUNT + 1)))
        second.terminate()
        if status := second.wait():
            sys.exit(f"the worker ended with status {status}")
    twice = sorted(order for order, count in handled().items() if count > 1)
    if twice != [7]:
        sys.exit(f"only order 7 was in flight, but these ran twice: {twice}")
    print(f"{COUNT + 1} orders are billed; of the killed worker only its task in flight ran again")


if __name__ == "__main__":
    main(*sys.argv[1:])
