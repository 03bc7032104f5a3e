"""The part of hooks_gpu.py that is not timed: planted faults, and what saferun says of each."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PROGRAMS = ROOT / "tests" / "programs"
RANGE = "10, 11, 12"  # the wrong values of wrong_index.py
GUARDS = ("hooks.guards.labels=on", "hooks.guards.embeddings=on")


class Fault(NamedTuple):
    """A program, and what is to be seen where it went as it should."""

    name: str
    program: str
    settings: tuple[str, ...]
    environ: dict[str, str]
    status: int
    said: str  # in its output or saferun's last words


FAULTS = [
    Fault(
        f"{fault} out of range{', caught' * bool(caught)}{', compiled' * bool(made)}",
        "gpu/wrong_index",
        settings,
        {"FAULT": fault, "CAUGHT": caught, "COMPILED": made},
        status,
        RANGE,
    )
    for fault in ("label", "token")
    for caught, made, settings, status in (
        ("", "", ("retry.debug_last=true",), 1),
        ("", "yes", ("retry.debug_last=true",), 1),
        ("yes", "", GUARDS, 0),
    )
]
FAULTS.append(
    Fault(
        "own @triton.autotune under autotune: off",
        "gpu/own_autotune",
        ("hooks.compile.autotune=off",),
        {},
        0,
        '"kept": "double"',
    )
)
TABLE = ["cuda-oom-fragmentation"]  # rows of mitigations.py --gpu


def machine() -> str:
    """Return one line about GPUs and versions."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "no GPU"
    return (
        f"{time.strftime('%Y-%m-%d')}: {name}, {os.cpu_count()} cores,"
        f" Python {platform.python_version()}, torch {torch.__version__}"
    )


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a job of ours that has a home of its own."""
    path = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "HOME": str(home)}
    return {**os.environ, "OMP_NUM_THREADS": "1", **own}


def receipts(runs: Path) -> list[dict[str, Any]]:
    """Return the lines of all receipts below a run directory."""
    files = sorted(runs.glob("*/receipts/*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def applied(runs: Path) -> dict[str, Any]:
    """Return what rank 0's receipts say in short: outcome by hook, checks in graphs, findings."""
    lines = [line for line in receipts(runs) if line.get("rank") == 0]
    found: dict[str, Any] = {
        line["hook"]: line["outcome"] for line in lines if line["outcome"] != "observed"
    }
    found["checks in graphs"] = sum(line.get("count", 0) for line in lines if "compiled" in line)
    left = {line["compiled"] for line in lines if line.get("compiled", "checks") != "checks"}
    found["graphs left alone"] = sorted(left)
    found["findings"] = [line["finding"] for line in lines if "finding" in line]
    return found


def plant(fault: Fault, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run a fault under saferun; return what came of it."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "saferun", "--run-dir", str(folder / "runs")]
    for setting in ("locks.gpus=off", "retry.backoff_s=[0, 0]", *fault.settings):
        command += ["--set", setting]
    script = folder / "train.py"
    script.write_text((PROGRAMS / f"{fault.program}.py").read_text())
    start = time.monotonic()
    try:
        done = subprocess.run(
            [*command, str(script)],
            env={**environment(folder), **fault.environ},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return {"name": fault.name, "ok": False, "seconds": limit_s, "said": "still running"}
    last = done.stderr.partition("the run failed")[2] if fault.status else done.stdout
    last = last or done.stderr[-2000:]
    last += "".join(json.dumps(line) + "\n" for line in receipts(folder / "runs") if "kept" in line)
    line = next((text for text in last.splitlines() if fault.said in text), "")
    return {
        "name": fault.name,
        "ok": done.returncode == fault.status and bool(line),
        "seconds": time.monotonic() - start,
        "said": " ".join(line.split()),
        "all": "" if line else done.stderr[-4000:],
    }


def treat(kind: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run a row of the mitigation table under torchrun and saferun."""
    command = [sys.executable, str(HERE / "mitigations.py"), "--gpu", kind]
    command += ["--way", "saferun", "--way", "torchrun", "--limit-s", str(limit_s)]
    start = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    line = next((text for text in done.stdout.splitlines() if kind in text), "")
    seconds = time.monotonic() - start
    ok = not done.returncode and "yes, " in line
    return {"name": kind, "ok": ok, "seconds": seconds, "said": line, "all": done.stderr[-2000:]}


def show(folder: Path, until: float, *, smoke: bool) -> Iterator[dict[str, Any]]:
    """Run all at the same time; yield what came of each.

    Args:
        folder: for what they write.
        until: time.monotonic() when all are to be over.
        smoke: no GPU is there: nothing is run.
    """
    if smoke:
        return
    left = min(150.0, until - time.monotonic())
    with ThreadPoolExecutor(len(FAULTS) + len(TABLE)) as lanes:
        waiting = [lanes.submit(treat, kind, folder, left) for kind in TABLE]
        for number, fault in enumerate(FAULTS):
            waiting.append(lanes.submit(plant, fault, folder / str(number), left))
        for one in as_completed(waiting):
            yield one.result()


def table(shown: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table of what was shown."""
    yield "| planted | as it should | seconds | the line |"
    yield "| --- | --- | --- | --- |"
    for found in shown:
        said = found["said"].replace("|", "/")
        yield f"| {found['name']} | {found['ok']} | {found['seconds']:.1f} | {said} |"


def shards(until: float, file: Path) -> str:
    """Return what shards.py prints, or as much as there is when the time is over."""
    left = min(150.0, until - time.monotonic())  # one that hangs must not take the others' time
    lanes = str((os.cpu_count() or 2) // 2)
    command = [sys.executable, str(HERE / "shards.py"), "--at-a-time", lanes]
    with open(file, "w") as out, open(os.devnull, "w") as err:
        process = subprocess.Popen([*command, "--limit-s", str(left)], stdout=out, stderr=err)
        try:
            process.wait(left)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return file.read_text() + "\nnot finished" * (process.returncode not in (0, 1))
