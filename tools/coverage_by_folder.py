"""Print the coverage of the last run of pytest per folder of the source."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path


def main() -> None:
    """Read `.coverage`; print the covered and the total lines and branches of each folder."""
    command = [sys.executable, "-m", "coverage", "json", "--quiet", "-o", "-"]
    report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for file, found in report["files"].items():
        summary = found["summary"]
        total = sums[str(Path(file).parent)]
        total[0] += summary["covered_lines"] + summary["covered_branches"]
        total[1] += summary["num_statements"] + summary["num_branches"]
    for folder, (covered, all_) in sorted(sums.items()):
        print(f"{folder:40} {100 * covered / max(all_, 1):5.1f} %  {covered:>6} of {all_}")


if __name__ == "__main__":
    main()
