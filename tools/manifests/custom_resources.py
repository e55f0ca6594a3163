"""Validates custom resources against the schemas of their operators.

The packages `cloudcoil.models.*` have models that were generated from the CRDs of cert-manager 1.17
and of the Prometheus operator 0.80. A model drops unknown fields and accepts a text for a number.
So a resource is valid only if the model serializes it to the same resource.
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
"""Modules of the models by `apiVersion`; imported at first use, because that takes seconds."""


def custom_problems(one: Resource) -> Iterator[str]:
    """Yield the problems of a resource whose `apiVersion` is in `DEFINED`."""
    model = getattr(import_module(DEFINED[one["apiVersion"]]), one["kind"], None)
    if model is None:
        yield "the kind is unknown"
        return
    try:
        understood = model.model_validate(one)
    except ValidationError as error:
        for wrong in error.errors():
            yield f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
        return
    yield from _differing(
        one, understood.model_dump(mode="json", by_alias=True, exclude_unset=True)
    )


def _differing(given: Any, understood: Any, place: str = "") -> Iterator[str]:
    """Yield the places where `given` differs from `understood`."""
    if isinstance(given, dict) and isinstance(understood, dict):
        for name, value in given.items():
            yield from _differing(value, understood.get(name), f"{place}.{name}".lstrip("."))
    elif isinstance(given, list) and isinstance(understood, list):
        for number, (value, known) in enumerate(zip(given, understood, strict=True)):
            yield from _differing(value, known, f"{place}.{number}")
    elif given != understood:
        yield f"{place}: {given!r} is unknown or has the wrong type"
