"""The tables of scale.py, as Markdown, from its JSON.

python benchmarks/scale_tables.py scale.json
"""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def machine() -> str:
    """Return what the numbers were measured on."""
    with open("/proc/meminfo") as file:
        gib = int(file.readline().split()[1]) / (1 << 20)
    cores = len(os.sched_getaffinity(0))
    versions = f"Python {platform.python_version()}, torch {metadata.version('torch')}"
    return f"{cores} cores, {gib:.0f} GiB, {versions}"


def text(document: dict[str, Any]) -> str:
    """Return all tables."""
    runs = document["runs"]
    parts = [document["machine"] + "."]
    if runs:
        parts += [curve(runs), _times(runs), _requests(runs), _steps(runs)]
    if document["ranks"]:
        parts.append(_ranks(document["ranks"]))
    return "\n\n".join(parts) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def curve(runs: list[dict[str, Any]]) -> str:
    """Return the short table of docs/scale.md: reports by the store, torchrun beside saferun."""
    by = {(run["nodes"], run["launcher"]): run["phases"] for run in runs}
    head = ["nodes", "all ranks started, s: torchrun, saferun", "rank killed to attempt 2, s"]
    head += ["requests a node until the start: torch's, ours", "to attempt 2: torch's, ours"]
    head += ["running, a node and second: torch's, ours", "KiB a node until the start"]
    rows = []
    for nodes in sorted({nodes for nodes, _ in by}):
        plain, ours = by.get((nodes, "torchrun")), by.get((nodes, "saferun"))
        if not plain or not ours:
            continue
        start, again, steady = (ours[name] for name in ("start", "again", "steady"))
        rows.append(
            [
                *(str(nodes), f"{plain['start']['seconds']:.1f}, {start['seconds']:.1f}"),
                *(f"{again['seconds']:.1f}", _split(start, nodes - 1), _split(again, nodes - 1)),
                _split(steady, (nodes - 1) * steady["seconds"]),
                f"{_bytes(plain['start'], nodes - 1)}, {_bytes(start, nodes - 1)}",
            ]
        )
    return _table(head, rows)


def _split(phase: dict[str, Any], by: float) -> str:
    asked = phase["requests"]
    if not by:
        return ""
    return f"{(asked['join'] + asked['other']) / by:.1f}, {asked['saferun'] / by:.1f}"


def _bytes(phase: dict[str, Any], nodes: int) -> str:
    both = sum(phase["sent_bytes"].values()) + phase["received_bytes"]
    return f"{both / nodes / 1024:.0f}" if nodes else "0"


def _times(runs: list[dict[str, Any]]) -> str:
    head = ["nodes", "launcher", "all ranks started, s", "of it after the last node joined, s"]
    head += ["rank killed to all in attempt 2, s", "of it after the last node joined, s"]
    head += ["all ended, s", "host's agent until then, CPU s"]
    rows = []
    for run in runs:
        start, again = run["phases"]["start"], run["phases"].get("again")
        cpu = run["host_agent_cpu_s"]
        rows.append(
            [
                *(str(run["nodes"]), run["launcher"]),
                *(f"{start['seconds']:.1f}", f"{start['since_last_join_s']:.1f}"),
                f"{again['seconds']:.1f}" if again else "",
                f"{again['since_last_join_s']:.1f}" if again else "",
                f"{run['phases']['end']['seconds']:.1f}",
                ", ".join(f"{cpu[name]:.1f}" for name in ("start", "again") if name in cpu),
            ]
        )
    return _table(head, rows)


def _requests(runs: list[dict[str, Any]]) -> str:
    head = ["nodes", "launcher", "part", "torch's requests a node", "ours a node"]
    head += ["KiB a node, both ways", "connections a node", "requests in the busiest second"]
    rows = []
    for run in runs:
        others = run["nodes"] - 1
        for name, phase in run["phases"].items() if others else ():
            asked, sent = phase["requests"], phase["sent_bytes"]
            both = sum(sent.values()) + phase["received_bytes"]
            rows.append(
                [
                    *(str(run["nodes"]), run["launcher"], name),
                    f"{(asked['join'] + asked['other']) / others:.1f}",
                    f"{asked['saferun'] / others:.1f}",
                    f"{both / others / 1024:.1f}",
                    f"{phase['connections'] / others:.1f}",
                    str(phase["peak_requests_per_s"]),
                ]
            )
    return _table(head, rows)


def _steps(runs: list[dict[str, Any]]) -> str:
    """Return ours by step, a node: what is constant costs O(nodes) at the host."""
    ours = [run for run in runs if run["launcher"] != "torchrun" and run["nodes"] > 1]
    sizes = [str(run["nodes"]) for run in ours]
    found: dict[str, list[float]] = {}
    for place, run in enumerate(ours):
        for name, phase in run["phases"].items():
            for request, count in phase["each"].items():
                if "saferun" in request:
                    row = found.setdefault(f"{name}: {_step(request)}", [0.0] * len(ours))
                    row[place] += count / (run["nodes"] - 1)
    return _table(
        ["our requests a node, by part and step", *sizes],
        [[step, *(f"{each:.1f}" for each in row)] for step, row in sorted(found.items())],
    )


def _step(request: str) -> str:
    """Return which step of ours a request belongs to, by the last word of its key."""
    key = request.split("/", 1)[1].removesuffix("/#")
    word = key.rpartition("/")[2]
    if word in ("first", "refused"):
        return "joining (a question a second)"
    if word in ("beat", "word", "wanted"):
        return "heartbeats"
    return "the end" if word in ("done", "all done") else "meeting"


def _ranks(ranks: list[dict[str, Any]]) -> str:
    head = ["ranks", "s", "requests a rank", "bytes a rank, both ways", "connections a rank"]
    rows = [
        [
            *(str(one["ranks"]), f"{one['seconds']:.2f}"),
            f"{sum(one['requests'].values()) / one['ranks']:.1f}",
            f"{(sum(one['sent_bytes'].values()) + one['received_bytes']) / one['ranks']:.0f}",
            f"{one['connections'] / one['ranks']:.1f}",
        ]
        for one in ranks
    ]
    return _table(head, rows)


if __name__ == "__main__":
    print(text(json.loads(Path(sys.argv[1]).read_text())))
