"""Draws busbw over size: `python plot.py FILE.png <RESULTS.json`. nexar does not depend on matplotlib."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any


def draw(results: dict[str, Any], path: str) -> None:
    """One plot per operation, side by side."""
    matplotlib = import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    names = list(dict.fromkeys(row["measure"] for row in results["rows"] if row["size_bytes"]))
    if not names:
        sys.exit("nothing that was measured has a size")
    figure, axes = pyplot.subplots(1, len(names), figsize=(6.4 * len(names), 4.8), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        _draw_one(axis, name, [row for row in results["rows"] if row["measure"] == name])
    figure.suptitle(results["title"], fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _draw_one(axis: Any, name: str, rows: list[dict[str, Any]]) -> None:
    for system in dict.fromkeys(system for row in rows for system in row["figures"]):
        found = [(row["size_bytes"], row["figures"][system]["busbw"]) for row in rows if system in row["figures"]]
        axis.plot(*zip(*found, strict=True), marker="o", markersize=3, label=system)
    axis.set(title=name, xlabel="size (bytes)", ylabel="busbw (GB/s)")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.grid(visible=True, which="both", alpha=0.3)
    axis.legend()


if __name__ == "__main__":
    draw(json.load(sys.stdin), sys.argv[1])
