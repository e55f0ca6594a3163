"""The page on the states of a queue shows the transition table of the code.

Goal: the diagram and both lists on the page are those that `batonmq._core.ownership` defines.
Method: the page is read as text and compared with what the module generates.
"""

from __future__ import annotations

from pathlib import Path

from batonmq._core.ownership import OwnershipInput, OwnershipState, mermaid_diagram

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs/explanation/queue-ownership-states.md").read_text()


def test_page_contains_exactly_the_diagram_of_the_table() -> None:
    diagrams = PAGE.split("```mermaid\n")[1:]
    assert [text.partition("\n```")[0] for text in diagrams] == [mermaid_diagram()]


def test_page_explains_every_state_and_input() -> None:
    rows = [f"| `{state.name}` | {state.value} |" for state in OwnershipState]
    rows += [f"| `{happened.name.lower()}` | {happened.value} |" for happened in OwnershipInput]
    listed = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert listed == rows
