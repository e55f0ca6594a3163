"""Checks of custom resources against the schemas of their operators.

The packages `cloudcoil.models.*` contain models that were generated from the CRDs of cert-manager
1.17 and of the Prometheus operator 0.80. A model ignores unknown fields and converts a string to a
number, so a resource is valid only if the model of it has the same values.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from pydantic import ValidationError

from tools.containers.pods import Resource

DEFINED = {
    "cert-manager.io/v1": "cloudcoil.models.cert_manager.v1",
    "monitoring.coreos.com/v1": "cloudcoil.models.prometheus_operator.v1",
}
"""Modules with the models, by `apiVersion`. An import takes seconds, so it waits for a use."""


def custom_problems(one: Resource) -> Iterator[str]:
    """Return the faults of a resource whose `apiVersion` is in `DEFINED`."""
    model = getattr(import_module(DEFINED[one["apiVersion"]]), one["kind"], None)
    if model is None:
        yield f"unknown kind {one['kind']}"
        return
    try:
        known = model.model_validate(one)
    except ValidationError as error:
        for wrong in error.errors():
            yield f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
        return
    yield from _differing(one, known.model_dump(mode="json", by_alias=True, exclude_unset=True))


def _differing(given: Any, known: Any, path: str = "") -> Iterator[str]:
    """Return the values of `given` that `known` does not have."""
    if isinstance(given, dict) and isinstance(known, dict):
        for name, value in given.items():
            yield from _differing(value, known.get(name), f"{path}.{name}".lstrip("."))
    elif isinstance(given, list) and isinstance(known, list):
        for number, (value, known_value) in enumerate(zip(given, known, strict=True)):
            yield from _differing(value, known_value, f"{path}.{number}")
    elif given != known:
        yield f"{path}: unknown field or value {given!r}"
