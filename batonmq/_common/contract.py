"""The contract of this version: which other versions its processes work with.

A change of a call or of a stored record that the version before does not understand raises
`CONTRACT`; the version that no longer understands an earlier one raises `CONTRACT_MIN`. An upgrade
from the version before needs `CONTRACT_MIN` to be at most its `CONTRACT`.
"""

from __future__ import annotations

CONTRACT = 2
CONTRACT_MIN = 0  # versions before contracts register none
CLOSED_QUEUES_CONTRACT = 2
"""From here on services know that a broker may have queues of a topic of which none takes messages
(`QueueSpread.closed`). A queue is closed so only where every reader of the topic knows it."""
