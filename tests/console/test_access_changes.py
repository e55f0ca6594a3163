"""Goal: an administrator grants, revokes and blocks in the console, with a plan before and an undo.

Method: the application on the in-memory broker, called without sockets; what a change has done is
read with the library.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import unescape

import httpx
import pytest

from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq_server.console.changes import CHANGES
from tests.console.scene import Scene, scene, words_of
from tests.console.test_changes import carry_out

GRANT = "/change/grant?identity=alice&role=consume&resource=topic%3Aorders"
ON_ORDERS = RoleGrant(Role.CONSUME, "topic:orders")


@asynccontextmanager
async def access_scene(**settings: object) -> AsyncIterator[tuple[Scene, AccessControl]]:
    async with scene(**settings) as shown, shown.broker.admin() as admin:
        yield shown, AccessControl(admin)


def undo_of(done: httpx.Response) -> str:
    assert done.status_code == 200, done.text
    found = re.search(r'href="([^"]+)">Undo<', done.text)
    assert found is not None
    return unescape(found[1])


async def grants_of(control: AccessControl, identity: str) -> tuple[RoleGrant, ...]:
    return tuple(grant for one in await control.list(identity) for grant in one.grants)


async def test_role_is_granted_after_a_plan_and_revoked_by_undo() -> None:
    async with access_scene() as (shown, control):
        assert "Show the plan" in await shown.page("/change/grant")
        assert "Nothing is changed yet" in await shown.page(GRANT)
        assert await grants_of(control, "alice") == ()
        undo = undo_of(await carry_out(shown, GRANT))
        assert await grants_of(control, "alice") == (ON_ORDERS,)
        assert "There is nothing to change" in await shown.page(GRANT)
        assert 'aria-label="Revoke consume on topic:orders from alice"' in await shown.page(
            "/access"
        )
        again = undo_of(await carry_out(shown, undo))
        assert await grants_of(control, "alice") == ()
        assert "There is nothing to change" in await shown.page(undo)
        await carry_out(shown, again)
        assert await grants_of(control, "alice") == (ON_ORDERS,)


async def test_all_rights_and_own_rights_are_warned_of() -> None:
    async with access_scene() as (shown, _):
        plan = await shown.page("/change/grant?identity=bob&role=admin&resource=cluster")
        assert "includes every permission" in plan
        assert "includes every permission" not in await shown.page(GRANT)


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("identity=alice&role=owner&resource=cluster", "there is no role"),
        ("identity=alice&role=admin&resource=everything", "everything"),
        ("identity=&role=admin&resource=cluster", "identity"),
    ],
)
async def test_grant_that_is_none_is_refused_and_changes_nothing(query: str, reason: str) -> None:
    async with access_scene() as (shown, control):
        path = f"/change/grant?{query}"
        planned = await shown.browser.get(path)
        done = planned if planned.status_code != 200 else await carry_out(shown, path)
        assert done.status_code == 400
        assert reason in words_of(done.text)
        assert await control.list() == ()


@pytest.mark.parametrize("kind", sorted(CHANGES))
async def test_change_without_fields_is_asked_for_or_refused(kind: str) -> None:
    async with scene() as shown:
        answer = await shown.browser.get(f"/change/{kind}?queue=0")
        if CHANGES[kind].asks is not None:
            assert answer.status_code == 200
            assert "Show the plan" in answer.text
        elif answer.status_code == 200:
            assert "There is nothing to change" in answer.text
        else:
            assert answer.status_code in (400, 404)


async def test_block_records_the_reason_and_ends_by_undo() -> None:
    async with access_scene() as (shown, control):
        assert "Show the plan" in await shown.page("/change/block")
        undo = undo_of(await carry_out(shown, "/change/block?subject=identity%3Amallory"))
        (found,) = await control.blocks()
        assert (found.subject, found.reason) == ("identity:mallory", "a test")
        page = await shown.page("/access")
        assert "a test" in words_of(page)
        assert 'aria-label="End the block of identity:mallory"' in page
        undo_of(await carry_out(shown, undo))
        assert await control.blocks() == ()


async def test_token_is_revoked_for_good() -> None:
    async with access_scene() as (shown, control):
        created = await control.create_token("alice")
        path = f"/change/revoke-token?token={created.token_id}"
        assert "of alice" in words_of(await shown.page(path))
        done = await carry_out(shown, path)
        assert done.status_code == 200
        assert "Undo" not in done.text
        assert all(not one.tokens for one in await control.list("alice"))
        assert "There is no such token" in words_of(await shown.page(path))


async def test_console_without_changes_offers_no_change_of_access() -> None:
    async with access_scene(changes=False) as (shown, control):
        await control.grant("alice", ON_ORDERS)
        page = await shown.page("/access")
        assert "alice" in page
        assert "/change/" not in page
        assert (await shown.browser.get(GRANT)).status_code == 403
