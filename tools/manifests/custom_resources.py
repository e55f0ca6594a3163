"""Custom resources, by the schemas of those who define them.

The packages `cloudcoil.models.*` have those of cert-manager 1.17 and of the operator of Prometheus
0.80 as models, made from their CRDs. A model leaves out what it does not know and takes a text for
a number, so what it makes of a resource has to be the resource.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cloudcoil.models.cert_manager.v1 as cert_manager
import cloudcoil.models.prometheus_operator.v1 as prometheus_operator
from pydantic import ValidationError

from tools.containers.pods import Resource

DEFINED = {"cert-manager.io/v1": cert_manager, "monitoring.coreos.com/v1": prometheus_operator}


def custom_problems(one: Resource) -> Iterator[str]:
    """What is wrong with a resource whose `apiVersion` is in `DEFINED`."""
    model = getattr(DEFINED[one["apiVersion"]], one["kind"], None)
    if model is None:
        yield "a kind that is not known"
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
    """Places where `given` is not `understood`."""
    if isinstance(given, dict) and isinstance(understood, dict):
        for name, value in given.items():
            yield from _differing(value, understood.get(name), f"{place}.{name}".lstrip("."))
    elif isinstance(given, list) and isinstance(understood, list):
        for number, (value, known) in enumerate(zip(given, understood, strict=True)):
            yield from _differing(value, known, f"{place}.{number}")
    elif given != understood:
        yield f"{place}: {given!r} is not known there"
