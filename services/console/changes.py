"""Changes that a person can carry out: each has a plan, which changes nothing, and the change.

The calls are made with the credential of the person, so the services decide whether they are
allowed, and record author and reason as for a command.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from batonmq._core.dead_letters import Criteria
from batonmq._core.queues import QueueRef
from batonmq._core.reset_targets import ShiftBy
from batonmq.admin.access import Role
from batonmq.admin.dead_letters import DeadLetters
from batonmq.admin.locks import Locks
from batonmq.admin.operation import Operation
from batonmq.admin.redriver import RedriveOptions, RedriveResult
from batonmq.admin.resets import ResetPlan, ResetResult, Resets, ResetScope
from batonmq.errors import InvalidArgument
from batonmq_server.console import access_changes as access
from batonmq_server.console.core.change_plan import (
    ChangePlan,
    ChangeResult,
    ItemResult,
    plan_sentence,
    reset_target,
)
from batonmq_server.console.core.formats import counted, span
from batonmq_server.console.core.remedies import change_path
from batonmq_server.console.producing import plan_produce, produce
from batonmq_server.console.viewers import Viewer

REDRIVES_SHOWN_MAX = 500
_OUTCOMES = {"redriven": "good", "repeated": "good", "passed_over": "warn", "refused": "bad"}
Fields = Mapping[str, str]


def _page_of_group(fields: Fields) -> str:
    return f"/groups/{quote(fields.get('group', ''), safe='')}"


def _page_of_topic(fields: Fields) -> str:
    return f"/topics/{quote(fields.get('topic', ''), safe='')}"


@dataclass(frozen=True, slots=True)
class Area:
    """What changes belong to: a group, a topic, or the access to the cluster.

    Attributes:
        section: Section of the console.
        role: Role that a person needs for a change.
        resource: The resource on which the person needs it.
        page: Path of the page to go back to.
    """

    section: str
    role: Role
    resource: Callable[[Fields], str]
    page: Callable[[Fields], str]


GROUP = Area("groups", Role.ADMIN, lambda fields: f"group:{fields.get('group')}", _page_of_group)
TOPIC = Area("topics", Role.PRODUCE, lambda fields: f"topic:{fields.get('topic')}", _page_of_topic)
ACCESS = Area("access", Role.ADMIN, lambda _: "cluster", lambda _: "/access")


@dataclass(frozen=True, slots=True)
class Change:
    """One kind of change.

    Attributes:
        plan: Returns what the change would do; changes nothing.
        carry_out: Does it, and returns what was done.
        asks: Field without which a form asks for the details of the change, and its template.
        template: Template of the plan.
    """

    plan: Callable[[Viewer, Fields], Awaitable[ChangePlan]]
    carry_out: Callable[[Viewer, Fields, Operation], Awaitable[ChangeResult]]
    area: Area = GROUP
    asks: tuple[str, str] | None = None
    template: str = "change.html"


def group_of(fields: Fields) -> str:
    """Return the group that a change concerns.

    Raises:
        InvalidArgument: There is none.
    """
    group = fields.get("group", "").strip()
    if not group:
        raise InvalidArgument("the change names no group", facts={"field": "group"})
    return group


def _queue_of(fields: Fields) -> QueueRef:
    queue_id = fields.get("queue", "")
    if not (queue_id.isascii() and queue_id.isdecimal() and len(queue_id) <= 9):
        raise InvalidArgument("the change names no queue", facts={"field": "queue"})
    return QueueRef(fields.get("topic", ""), fields.get("broker", ""), int(queue_id))


def _kept(fields: Fields, *names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, fields[name]) for name in names if fields.get(name))


# ---- pause and resume


async def _plan_pause(viewer: Viewer, fields: Fields) -> ChangePlan:
    group = await viewer.admin.describe_group(group_of(fields))
    return ChangePlan(
        f"Pause group {group.name}",
        (
            f"No new message is delivered to its {counted(len(group.members), 'member')}; "
            "messages in flight are still handled and acknowledged.",
        ),
        "Pause the group",
        _kept(fields, "group"),
        possible=group.pause is None,
    )


async def _pause(viewer: Viewer, fields: Fields, operation: Operation) -> ChangeResult:
    group = group_of(fields)
    await viewer.admin.pause_group(group, operation.by, operation.reason)
    return ChangeResult((f"Group {group} is paused.",), undo=change_path("resume", group))


async def _plan_resume(viewer: Viewer, fields: Fields) -> ChangePlan:
    group = await viewer.admin.describe_group(group_of(fields))
    sentences: tuple[str, ...]
    if group.pause is None:
        sentences = ("The group is not paused.",)
    else:
        why = f": {group.pause.reason}" if group.pause.reason else ""
        sentences = (
            f"{group.pause.by} has paused it{why}.",
            "Deliveries to all members start again at once.",
        )
    return ChangePlan(
        f"Resume group {group.name}",
        sentences,
        "Resume the group",
        _kept(fields, "group"),
        possible=group.pause is not None,
    )


async def _resume(viewer: Viewer, fields: Fields, operation: Operation) -> ChangeResult:
    group = group_of(fields)
    await viewer.admin.resume_group(group, operation.by, operation.reason)
    return ChangeResult((f"Group {group} is resumed.",), undo=change_path("pause", group))


# ---- force release


async def _plan_release(viewer: Viewer, fields: Fields) -> ChangePlan:
    group, queue = group_of(fields), _queue_of(fields)
    detail = await Locks(viewer.admin).describe(group, queue)
    lock = detail.lock
    owned = lock.client_id is not None
    lease = f"its lease ends in {span(detail.lease_left_ms)}"
    sentences = (
        f"{lock.client_id} has owned {queue} for {span(lock.held_ms)} under token {lock.token}; "
        f"{lease if detail.lease_left_ms else 'its lease has expired'}."
        if owned
        else f"{queue} has no owner at the moment.",
        "The owner is fenced: its acknowledgements are rejected from then on.",
        "The next owner gets the messages in flight again, flagged as redelivered. If the owner "
        "is alive and the queue is still assigned to it, it acquires the queue again at once.",
    )
    return ChangePlan(
        f"Force the release of {queue} in group {group}",
        sentences,
        "Force the release",
        _kept(fields, "group", "topic", "broker", "queue"),
        warning="The former owner may still be handling messages that the next owner gets, so "
        "they may be handled twice. This can't be undone.",
        possible=owned,
    )


async def _release(viewer: Viewer, fields: Fields, operation: Operation) -> ChangeResult:
    group, queue = group_of(fields), _queue_of(fields)
    done = await Locks(viewer.admin).force_release(group, queue, operation)
    return ChangeResult(
        (
            f"{queue} is released. Its owner was {done.client_id or 'none'}, with up to "
            f"{counted(done.maybe_seen_count, 'message')} in flight; the new token is "
            f"{done.token}.",
        )
    )


# ---- reset, skip and undo


def _scope_of(fields: Fields) -> ResetScope:
    if fields.get("queue"):
        queue = _queue_of(fields)
        return ResetScope(queue.topic, (queue.broker, queue.queue_id))
    return ResetScope(fields.get("topic", "").strip())


async def _reset_plan(viewer: Viewer, fields: Fields, op_id: str = "") -> ResetPlan:
    target = reset_target(fields.get("target", ""), fields.get("value", ""))
    return await Resets(viewer.admin).plan(group_of(fields), target, _scope_of(fields), op_id)


async def _skip_plan(viewer: Viewer, fields: Fields) -> ResetPlan:
    _queue_of(fields)
    resets = Resets(viewer.admin)
    return await resets.plan(group_of(fields), ShiftBy(1), _scope_of(fields))


async def _plan_reset(viewer: Viewer, fields: Fields) -> ChangePlan:
    plan = await _reset_plan(viewer, fields)
    dry = await Resets(viewer.admin).reset(plan, _DRY, dry_run=True)
    return ChangePlan(
        f"Reset the progress of group {plan.group}",
        (plan_sentence(dry.steps), *plan.notes, *dry.problems),
        "Reset the progress",
        _kept(fields, "group", "topic", "broker", "queue", "target", "value"),
        dry.steps,
        possible=bool(dry.steps),
    )


async def _plan_skip(viewer: Viewer, fields: Fields) -> ChangePlan:
    plan = await _skip_plan(viewer, fields)
    dry = await Resets(viewer.admin).reset(plan, _DRY, dry_run=True)
    moves = any(step.from_offset != step.to_offset for step in dry.steps)
    return ChangePlan(
        f"Skip the oldest message of {plan.offsets[0][0]} in group {plan.group}",
        (plan_sentence(dry.steps), *plan.notes, *dry.problems),
        "Skip the message",
        (
            *_kept(fields, "group", "topic", "broker", "queue"),
            *(("from", str(step.from_offset)) for step in dry.steps),
        ),
        dry.steps,
        possible=moves,
    )


async def _reset(viewer: Viewer, fields: Fields, operation: Operation) -> ChangeResult:
    plan = await _reset_plan(viewer, fields, operation.op_id)
    return _reset_result(plan.group, operation, await _do_reset(viewer, plan, operation))


async def _skip(viewer: Viewer, fields: Fields, operation: Operation) -> ChangeResult:
    plan = await _skip_plan(viewer, fields)
    dry = await Resets(viewer.admin).reset(plan, _DRY, dry_run=True)
    if [str(step.from_offset) for step in dry.steps] != [fields.get("from", "")]:
        raise InvalidArgument(
            "the progress has moved since the plan: another message is the oldest one now",
            remedy="Load the plan again.",
            facts={"field": "from"},
        )
    return _reset_result(plan.group, operation, await _do_reset(viewer, plan, operation))


async def _do_reset(viewer: Viewer, plan: ResetPlan, operation: Operation) -> ResetResult:
    return await Resets(viewer.admin).reset(plan, operation)


async def _plan_undo(viewer: Viewer, fields: Fields) -> ChangePlan:
    group, op_id = group_of(fields), fields.get("op", "")
    dry = await Resets(viewer.admin).undo(group, op_id, _DRY, dry_run=True)
    return ChangePlan(
        f"Undo operation {op_id} of group {group}",
        (plan_sentence(dry.steps), *dry.problems),
        "Undo it",
        _kept(fields, "group", "op"),
        dry.steps,
        possible=bool(dry.steps),
    )


async def _undo(viewer: Viewer, fields: Fields, operation: Operation) -> ChangeResult:
    group = group_of(fields)
    done = await Resets(viewer.admin).undo(group, fields.get("op", ""), operation)
    return _reset_result(group, operation, done)


def _reset_result(group: str, operation: Operation, done: ResetResult) -> ChangeResult:
    undo = change_path("undo", group, {"op": operation.op_id}) if done.steps else ""
    return ChangeResult(
        (plan_sentence(done.steps), f"It is recorded as operation {operation.op_id}."),
        done.steps,
        problems=done.problems,
        undo=undo,
    )


# ---- dead letters


def criteria_of(fields: Fields) -> Criteria:
    """Return the selection of dead letters that a form contains.

    Raises:
        BatonError: The expression can't be parsed.
    """
    return Criteria(
        cause=fields.get("cause", ""),
        tag=fields.get("tag", "").strip(),
        key=fields.get("key", "").strip(),
        expression=fields.get("expression", "").strip() or "*",
    )


async def _plan_redrive(viewer: Viewer, fields: Fields) -> ChangePlan:
    group, count, passed = group_of(fields), 0, 0
    async for letter in DeadLetters(viewer.admin).read(group, criteria_of(fields)):
        passed += letter.redriven
        count += not letter.redriven
    way = (
        "Each is sent to the topic where it was first stored: all groups of the topic get it."
        if fields.get("to_topic")
        else "Each is sent to the retry topic of the group: only this group gets it again."
    )
    return ChangePlan(
        f"Redrive dead letters of group {group}",
        (
            f"{counted(count, 'dead letter')} would be sent again; {passed:,} were redriven before "
            "and are passed over.",
            way,
        ),
        f"Redrive {counted(count, 'dead letter')}",
        _kept(fields, "group", "cause", "tag", "key", "expression", "to_topic"),
        warning="Messages that are sent again can't be taken back.",
        possible=count > 0,
    )


async def _redrive(viewer: Viewer, fields: Fields, operation: Operation) -> ChangeResult:
    group = group_of(fields)
    options = RedriveOptions(operation=operation, to_topic=bool(fields.get("to_topic")))
    letters = DeadLetters(viewer.admin).redrive(group, options, criteria_of(fields))
    counts, items = dict.fromkeys(_OUTCOMES, 0), list[ItemResult]()
    async for result in letters:
        counts[result.outcome] += 1
        if len(items) < REDRIVES_SHOWN_MAX:
            items.append(_item(result))
    words = ", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in counts.items() if n)
    return ChangeResult(
        (f"{words or 'no dead letter'}. It is recorded as operation {operation.op_id}.",),
        items=items,
    )


def _item(result: RedriveResult) -> ItemResult:
    if result.error is not None:
        text = f"{result.error.reason}: {result.error.message}"
    elif result.queue is not None:
        text = f"stored at {result.queue} offset {result.offset} as {result.message_id}"
    else:
        text = "redriven before"
    name = result.letter.message_id
    return ItemResult(name, result.outcome.replace("_", " "), _OUTCOMES[result.outcome], text)


_DRY = Operation("console", "plan")
CHANGES: Mapping[str, Change] = {
    "pause": Change(_plan_pause, _pause),
    "resume": Change(_plan_resume, _resume),
    "release": Change(_plan_release, _release),
    "reset": Change(_plan_reset, _reset, asks=("target", "reset.html")),
    "skip": Change(_plan_skip, _skip),
    "undo": Change(_plan_undo, _undo),
    "produce": Change(plan_produce, produce, TOPIC, template="produce.html"),
    "redrive": Change(_plan_redrive, _redrive),
    "grant": Change(access.plan_grant, access.grant_role, ACCESS, ("role", "grant.html")),
    "revoke": Change(access.plan_revoke, access.revoke_role, ACCESS),
    "revoke-token": Change(access.plan_revoke_token, access.revoke_token, ACCESS),
    "block": Change(access.plan_block, access.block, ACCESS, ("subject", "block.html")),
    "unblock": Change(access.plan_unblock, access.unblock, ACCESS),
}
