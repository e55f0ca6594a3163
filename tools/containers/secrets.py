"""Secrets as the kubelet mounts them, from the certificates of deploy/k8s/scripts/make-ca.sh.

A Secret is a folder of links to `..data`, which is a link to the folder with the files. Only that
one link is replaced, so a reader sees either the old files or the new ones.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

from tools.containers.pods import REPO

CLIENTS = ("operator", "demo", "nobody")
FOREIGN_SECRET = "tls-stranger"
"""Secret with a certificate of an untrusted authority and the CA of the cluster."""
_SCRIPT = REPO / "deploy" / "k8s" / "scripts" / "make-ca.sh"


class Secrets:
    """All Secrets of one cluster, as folders.

    Args:
        folder: An empty folder for these Secrets only.

    Attributes:
        mounted: Folder with a folder for each Secret.
    """

    def __init__(self, folder: Path) -> None:
        self._made, self._others = folder / "made", folder / "others"
        self.mounted = folder / "mounted"
        self._versions = itertools.count(1)

    def make(self) -> None:
        """Issue all certificates; existing ones are replaced with new keys."""
        _make(self._made, *CLIENTS)
        _make(self._others, "stranger")
        trusted = self._made / "ca.crt"
        shutil.copy(trusted, self._others / FOREIGN_SECRET / "ca.crt")
        for one in (
            *(path.parent for path in self._made.glob("*/tls.crt")),
            self._others / FOREIGN_SECRET,
        ):
            self._show(one)

    def file(self, secret: str, name: str) -> Path:
        """Return the path of a file of a Secret."""
        return self.mounted / secret / name

    def _show(self, made: Path) -> None:
        shown = self.mounted / made.name
        version = shown / f"..{next(self._versions)}"
        version.mkdir(parents=True)
        for path in made.iterdir():
            copy = version / path.name
            shutil.copyfile(path, copy)
            copy.chmod(0o444)  # users of containers differ; the folder above is private
            link = shown / path.name
            if not link.is_symlink():
                link.symlink_to(Path("..data") / path.name)
        data, draft = shown / "..data", shown / "..data.new"
        before = data.resolve() if data.is_symlink() else None
        draft.symlink_to(version.name)
        draft.rename(data)
        if before is not None:
            shutil.rmtree(before)


def _make(folder: Path, *clients: str) -> None:
    subprocess.run(
        ["env", "RENEW=1", str(_SCRIPT), str(folder), *clients],
        check=True,
        capture_output=True,
    )
