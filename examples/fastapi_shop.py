"""A web shop in FastAPI: an order in the database is billed, once, whatever fails in between.

    baton up                                         # in another terminal
    python examples/fastapi_shop.py [NAMESERVER [DATABASE]]

NAMESERVER is $BATON_NAMESERVER by default, or else 127.0.0.1:9876. DATABASE is a URL of SQLAlchemy,
such as postgresql+psycopg://…; by default it is a file of SQLite. The program sends orders to its
own application, without a port. To serve it: uvicorn --factory fastapi_shop:create_app

The lifespan of the application has the clients, a dependency hands the producer to the endpoints.
An order and its message are one transaction: the broker asks the shop what became of an order whose
process died. The bill has the order's id as its primary key, so a second delivery changes nothing.

Needs: pip install 'batonmq[pydantic,sql]' fastapi httpx
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import httpx
import sqlalchemy as sa
from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel, Field

from batonmq import (
    Admin,
    Consumer,
    ConsumerSettings,
    PendingTransaction,
    Producer,
    ReceivedMessage,
    TransactionState,
)
from batonmq.schemas import PydanticSchema, decoding

TOPIC, GROUP, SHOP = "shop-orders", "shop-billing", "web-shop"
NAMESERVER = os.environ.get("BATON_NAMESERVER", "127.0.0.1:9876")
COUNT = 30
METADATA = sa.MetaData()
ORDERS = sa.Table(
    "shop_orders",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("cents", sa.BigInteger, nullable=False),
)
BILLS = sa.Table(
    "shop_bills",
    METADATA,
    sa.Column("order_id", sa.Text, primary_key=True),
    sa.Column("cents", sa.BigInteger, nullable=False),
)


class Order(BaseModel):
    """The body of a request and of a message."""

    id: str = Field(min_length=1, max_length=100)
    cents: int = Field(gt=0)


SCHEMA = PydanticSchema(Order)


class Shop:
    """The orders and bills in the database. Its calls wait, so they run in threads."""

    def __init__(self, database: str) -> None:
        self._engine = sa.create_engine(database)
        METADATA.create_all(self._engine)

    def book(self, order: Order) -> None:
        """Store an order."""
        with self._engine.begin() as connection:
            connection.execute(sa.insert(ORDERS).values(order.model_dump()))

    def bill(self, order: Order, _: ReceivedMessage) -> None:
        """Write the bill of an order, if it has none."""
        with self._engine.begin() as connection:
            found = sa.select(BILLS.c.order_id).where(BILLS.c.order_id == order.id)
            if connection.execute(found).first() is None:
                connection.execute(sa.insert(BILLS).values(order_id=order.id, cents=order.cents))

    def billed(self, order_id: str) -> int | None:
        """Return the sum on the bill of an order; None if it has none."""
        with self._engine.connect() as connection:
            wanted = sa.select(BILLS.c.cents).where(BILLS.c.order_id == order_id)
            return connection.execute(wanted).scalar()

    def state(self, pending: PendingTransaction) -> TransactionState:
        """Say what became of an order: the row in the database is the answer."""
        order_id = pending.message.keys[0]
        with self._engine.connect() as connection:
            wanted = sa.select(ORDERS.c.id).where(ORDERS.c.id == order_id)
            known = connection.execute(wanted).first() is not None
        return TransactionState.COMMIT if known else TransactionState.ROLLBACK

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()


def producer_of(request: Request) -> Producer:
    """Return the producer of the application."""
    producer: Producer = request.app.state.producer
    return producer


def create_app(nameserver: str = NAMESERVER, database: str = "sqlite:///shop.db") -> FastAPI:
    """Return the application."""
    shop = Shop(database)

    async def check(pending: PendingTransaction) -> TransactionState:
        return await asyncio.to_thread(shop.state, pending)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with Admin(nameserver) as admin:
            await admin.create_topic(TOPIC, 4)
        settings = ConsumerSettings(consume_from="first")
        async with (
            Producer(nameserver, group=SHOP, transaction_checker=check) as producer,
            Consumer(nameserver, GROUP, {TOPIC: "*"}, settings) as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            app.state.producer = producer
            tasks.create_task(consumer.run(decoding(SCHEMA, shop.bill)))
            yield
            consumer.stop()
        shop.close()

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders", status_code=201)
    async def place(order: Order, producer: Annotated[Producer, Depends(producer_of)]) -> Order:
        try:
            async with producer.transaction(TOPIC, SCHEMA.encode(order), keys=[order.id]):
                await asyncio.to_thread(shop.book, order)
        except sa.exc.IntegrityError as error:
            raise HTTPException(409, f"order {order.id} exists already") from error
        return order

    @app.get("/bills/{order_id}")
    async def bill(order_id: str) -> int:
        cents = await asyncio.to_thread(shop.billed, order_id)
        if cents is None:
            raise HTTPException(404, f"order {order_id} has no bill yet")
        return cents

    return app


async def order_all(client: httpx.AsyncClient, run: str) -> dict[str, int]:
    """Place each order twice; return the orders that were accepted, with their sums."""
    accepted: dict[str, int] = {}
    for number in range(COUNT):
        order = {"id": f"{run}-{number}", "cents": 100 + number}
        answers = [await client.post("/orders", json=order) for _ in range(2)]
        if [answer.status_code for answer in answers] != [201, 409]:
            sys.exit(f"order {order} was answered {answers}")
        accepted[f"{run}-{number}"] = 100 + number
    if (refused := await client.post("/orders", json={"id": "x"})).status_code != 422:
        sys.exit(f"an order without a sum was answered {refused}")
    return accepted


async def main(nameserver: str = NAMESERVER, database: str = "") -> None:
    """Place orders, and wait until each has its bill."""
    with tempfile.TemporaryDirectory() as folder:
        app = create_app(nameserver, database or f"sqlite:///{folder}/shop.db")
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://shop") as client,
            asyncio.timeout(60),
        ):
            accepted = await order_all(client, secrets.token_hex(3))
            for order_id, cents in accepted.items():
                url = f"/bills/{order_id}"
                while (answer := await client.get(url)).status_code == 404:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                if answer.json() != cents:
                    sys.exit(f"the bill of {order_id} says {answer.json()}, not {cents}")
    print(f"{COUNT} orders were placed twice and billed once")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
