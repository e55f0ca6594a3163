"""Generated tables of settings and metrics.

They are in docs/reference/operations.md and docs/reference/metrics.md.

    python -m tools.docs.tables     writes them again

A table is between `<!-- begin NAME -->` and `<!-- end NAME -->`; the rest of the page is not
changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from pydantic.fields import FieldInfo

from batonmq._process.config import Settings
from batonmq._process.settings_help import allowed_of, default_of, meanings, unit_of
from batonmq_server.console.config import PREFIX as CONSOLE_PREFIX
from batonmq_server.console.config import ConsoleSettings
from batonmq_server.gateway.config import GatewaySettings
from batonmq_server.lockmgr.config import LockmgrSettings
from batonmq_server.nameserver.config import NameserverSettings
from batonmq_server.offsets.config import OffsetsSettings
from batonmq_server.runtime.settings import ServiceSettings
from batonmq_server.scaler.config import PREFIX as SCALER_PREFIX
from batonmq_server.scaler.config import ScalerSettings
from batonmq_server.storage.config import StorageSettings
from batonspark.settings import JobSettings
from tools.docs.metric_families import families

DOCS = Path(__file__).parents[2] / "docs"
SETTINGS: Mapping[str, type[ServiceSettings]] = {
    "storage": StorageSettings,
    "offsets": OffsetsSettings,
    "lockmgr": LockmgrSettings,
    "nameserver": NameserverSettings,
    "gateway": GatewaySettings,
}
_BLOCK = re.compile(r"(<!-- begin ([a-z -]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def settings() -> dict[str, str]:
    """Return every table of settings by its name, as Markdown."""
    found = {"settings common": _settings(ServiceSettings, "<SERVICE>", _common_fields())}
    for service, kind in SETTINGS.items():
        own = [name for name in kind.model_fields if name in kind.__annotations__]
        found[f"settings {service}"] = _settings(kind, service.upper(), own)
    console = CONSOLE_PREFIX.removeprefix("BATON_")
    found["settings console"] = _settings(ConsoleSettings, console, ConsoleSettings.model_fields)
    scaler = SCALER_PREFIX.removeprefix("BATON_")
    found["settings scaler"] = _settings(ScalerSettings, scaler, ScalerSettings.model_fields)
    found["settings spark"] = _settings(JobSettings, "SPARK", JobSettings.model_fields)
    return found


def metrics() -> dict[str, str]:
    """Return every table of metrics by its name, as Markdown."""
    heads = ("Name", "Type", "Labels", "Meaning")
    return {
        f"metrics {owner}": _table(
            heads,
            (
                (f"`{f.name}`", f.kind, ", ".join(f"`{label}`" for label in f.labels), f.meaning)
                for f in found
            ),
        )
        for owner, found in families().items()
    }


PAGES: Mapping[Path, Callable[[], dict[str, str]]] = {
    DOCS / "reference" / "operations.md": settings,
    DOCS / "reference" / "metrics.md": metrics,
}


def rewritten(page: str, found: Mapping[str, str]) -> str:
    """Return `page` with the tables of `found`."""
    return _BLOCK.sub(lambda block: block[1] + found.get(block[2], "") + block[3], page)


def names_of(page: str) -> list[str]:
    """Return the names of the tables on the page, in order."""
    return [block[2] for block in _BLOCK.finditer(page)]


def _common_fields() -> list[str]:
    return [name for name in ServiceSettings.model_fields if name != "node_id"]


def _settings(kind: type[Settings], service: str, names: Iterable[str]) -> str:
    told = meanings(kind)
    rows = []
    for name in names:
        field = kind.model_fields[name]
        variable = f"`BATON_{service}_{name.upper()}`"
        rows.append(
            (variable, unit_of(name, field), _default(field), allowed_of(field), told[name])
        )
    return _table(("Variable", "Unit", "Default", "Allowed", "Meaning"), rows)


def _default(field: FieldInfo) -> str:
    text = default_of(field)
    if text is None:
        return "**required**"
    return f"`{text}`" if text else "empty"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


if __name__ == "__main__":
    for path, lists in PAGES.items():
        path.write_text(rewritten(path.read_text(), lists()))
