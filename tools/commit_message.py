"""Check the subject of a commit message: `area: imperative sentence`, at most 72 characters.

pre-commit runs it as its commit-msg hook: `python -m tools.commit_message FILE`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SUBJECT_CHARACTERS_MAX = 72
_AREA = re.compile(r"[a-z][a-z0-9 _/.-]*: \S")
_MERGE = re.compile(r"(Merge|Revert) ")


def problem(message: str) -> str:
    """Return the problem of the first line of a commit message; empty if there is none."""
    subject = message.partition("\n")[0].rstrip()
    if _MERGE.match(subject):
        return ""
    if not _AREA.match(subject):
        return f"{subject!r} does not name its area: write `storage: sync once per batch`"
    if len(subject) > SUBJECT_CHARACTERS_MAX:
        return f"the subject has {len(subject)} characters; the limit is {SUBJECT_CHARACTERS_MAX}"
    if subject.endswith("."):
        return "the subject ends with a full stop; remove it"
    return ""


def main(path: str) -> int:
    """Check the message in a file; return the exit status."""
    found = problem(Path(path).read_text())
    if found:
        print(found, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
