"""The warning that a change has no effect because access control is off."""

from __future__ import annotations

from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq.admin.admin import Admin
from batonmq.cli.session import CommandSession


async def warn_if_access_is_off(session: CommandSession, admin: Admin, change: str) -> None:
    """Print a warning if the services do not check permissions.

    Args:
        change: What has no effect then, such as `the grant`.
    """
    check = await AccessControl(admin).check(RoleGrant(Role.ADMIN, "cluster"))
    if not check.access_on:
        session.output.note(
            f"warning: {change} has no effect, because access control is off: every client may do "
            "everything. docs/how-to/security.md says how to switch it on."
        )
