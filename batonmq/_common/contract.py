"""The contract of this version: which other versions its processes work with.

A change of a call or of a stored record that the version before does not understand raises
`CONTRACT`; the version that no longer understands an earlier one raises `CONTRACT_MIN`. An upgrade
from the version before needs `CONTRACT_MIN` to be at most its `CONTRACT`.
"""

from __future__ import annotations

CONTRACT = 1
CONTRACT_MIN = 0  # versions before contracts register none
