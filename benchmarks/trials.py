"""What the hook `optuna` costs a trial: paired runs, medians, in milliseconds of wall and CPU time.

    python benchmarks/trials.py [PAIRS] [TRIALS]        (default 7 pairs of 100 trials)
    python benchmarks/trials.py died

Each pair runs the same search without and with the hook, in turn first, so that a slow moment of
the machine falls on both. The objective does nothing, the sampler is seeded TPE, and the storage
lies in memory (/dev/shm), where the disk hides nothing.

The next rows are the start of a search until its first trial, alone and where saferun replaces the
process after each trial: from the end of one trial to the beginning of the next process's first.

The last rows, which come alone with `died` in place of PAIRS, are of a process that is killed: from
its death to the first line of the one that replaces it, to its imports' end and to its first result
of CUDA (of the CPU where there is no GPU), for each way of `start.ranks`. Under `warm` a process
lives long enough (LIFE_S) for the next one to have imported.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from saferun.model import as_tree
from saferun.settings import HookSettings, OptunaHook

SITE = Path(__file__).resolve().parents[1] / "src" / "saferun" / "inject" / "site"
SEARCH = """
import sys, time, optuna
optuna.logging.set_verbosity(optuna.logging.ERROR)
if sys.argv[1] == "sqlite":
    storage = "sqlite:///study.db"
else:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    storage = JournalStorage(JournalFileBackend("study.log"))
study = optuna.create_study(storage=storage, sampler=optuna.samplers.TPESampler(seed=1))
search = lambda trial: trial.suggest_float("x", 0, 1) + trial.suggest_int("n", 1, 9)
study.optimize(search, n_trials=5)
cpu, wall = time.process_time(), time.perf_counter()
study.optimize(search, n_trials=int(sys.argv[2]))
print(time.perf_counter() - wall, time.process_time() - cpu)
"""
REPLACED = """
import sys, time
print("start", time.time_ns(), flush=True)
import optuna
if sys.argv[1] == "torch":
    import torch
print("imported", time.time_ns(), flush=True)
optuna.logging.set_verbosity(optuna.logging.ERROR)
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
storage = JournalStorage(JournalFileBackend("study.log"))
def objective(trial):
    print("begin", time.time_ns(), flush=True)
    print("end", time.time_ns(), flush=True)
    return trial.suggest_float("x", 0, 1)
study = optuna.create_study(study_name="s", storage=storage)
study.optimize(objective, n_trials=int(sys.argv[2]))
"""
DIED = """
import sys, time
print("start", time.time_ns(), flush=True)
import optuna, os, signal, torch
if sys.argv[1] == "transformers":
    import transformers.trainer
print("imported", time.time_ns(), flush=True)
optuna.logging.set_verbosity(optuna.logging.ERROR)
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
results = []
def objective(trial):
    x = torch.ones(256, 256, device="cuda" if torch.cuda.is_available() else "cpu")
    if not results:
        results.append(float((x @ x).sum()))
        print("result", time.time_ns(), flush=True)
    elif int(os.environ["SAFERUN_ATTEMPT"]) <= int(sys.argv[2]):
        time.sleep(float(sys.argv[3]))
        print("death", time.time_ns(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        trial.study.stop()
    return trial.suggest_float("x", 0, 1)
storage = JournalStorage(JournalFileBackend("study.log"))
study = optuna.create_study(study_name="s", storage=storage)
study.optimize(objective)
"""
LIFE_S = {"spawn": 1.0, "warm": 30.0}
START = "import optuna, os; os.write(1, b'.')"


def environ(folder: str, *, hooked: bool) -> dict[str, str]:
    """Return the environment of a search, with a contract where the hook is asked for."""
    bare = {k: v for k, v in os.environ.items() if not k.startswith("SAFERUN_")}
    if not hooked:
        return bare
    state = os.path.join(folder, "state")
    os.makedirs(state, exist_ok=True)
    contract = {
        **{"v": 1, "run": "b", "attempt": 1, "mitigations": [], "state": state},
        "hooks": as_tree(HookSettings(optuna=OptunaHook(mode="on", recycle_every=100000))),
        "receipts": os.path.join(folder, "receipts"),
    }
    path = os.pathsep.join(filter(None, [str(SITE), bare.get("PYTHONPATH")]))
    return {**bare, "PYTHONPATH": path, "SAFERUN_INJECT": json.dumps(contract)}


def search_ms(kind: str, trials: int, *, hooked: bool) -> tuple[float, float]:
    """Return the wall and CPU time of one trial."""
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        done = subprocess.run(
            [sys.executable, "-c", SEARCH, kind, str(trials)],
            env=environ(folder, hooked=hooked),
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    wall, cpu = map(float, done.stdout.split())
    return wall * 1e3 / trials, cpu * 1e3 / trials


def start_ms(*, hooked: bool) -> tuple[float, float]:
    """Return the wall and CPU time until a script has imported Optuna."""
    with tempfile.TemporaryDirectory() as folder:
        before, begun = os.times(), time.perf_counter()
        env = environ(folder, hooked=hooked)
        subprocess.run([sys.executable, "-c", START], env=env, check=True, capture_output=True)
        wall, after = time.perf_counter() - begun, os.times()
    cpu = after.children_user + after.children_system
    return wall * 1e3, (cpu - before.children_user - before.children_system) * 1e3


def stamps(search: str, settings: Iterable[str], *words: str) -> dict[str, list[int]]:
    """Return when a search printed what under saferun: its words -> times in ns.

    Args:
        search: the text of its script.
        settings: of saferun, as KEY=VALUE.
        words: the script's arguments.
    """
    arguments = [sys.executable, "-m", "saferun", "--profile=cpu"]
    arguments += [f"--set={one}" for one in settings]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "HOME": folder, "SAFERUN_RUN_DIR": os.path.join(folder, "runs")}
        env["PATH"] = f"{os.path.dirname(sys.executable)}:{env['PATH']}"
        Path(folder, "search.py").write_text(search)
        command = [*arguments, "search.py", *words]
        done = subprocess.run(
            command, env=env, cwd=folder, capture_output=True, text=True, check=True
        )
    at: dict[str, list[int]] = {}
    for line in done.stdout.splitlines():
        what, moment = line.split()
        at.setdefault(what, []).append(int(moment))
    return at


def replaced_ms(imports: str, count: int) -> tuple[list[float], list[float], list[float]]:
    """Return, for each of a search's processes but the first: from trial to trial, start, imports.

    Args:
        imports: "torch" or "optuna".
        count: trials, one a process.
    """
    keys = ("launcher=python", "hooks.optuna.mode=on", "hooks.optuna.recycle_every=1")
    at = stamps(REPLACED, keys, imports, str(count))

    def gaps(first: list[int], second: list[int]) -> list[float]:
        return [(b - a) / 1e6 for a, b in zip(first, second, strict=False)]

    start = gaps(at["start"][1:], at["begin"][1:])
    return gaps(at["end"], at["begin"][1:]), start, gaps(at["start"][1:], at["imported"][1:])


def died(way: str, imports: str, deaths: int) -> str:
    """Return a row: from a process's death to the next one's first line, imports and result."""
    keys = ("launcher=python", "hooks.optuna.mode=on", "retry.backoff_s=[0, 0]")
    at = stamps(DIED, (*keys, f"start.ranks={way}"), imports, str(deaths), str(LIFE_S[way]))
    cells = []
    for what in ("start", "imported", "result"):
        gaps = [(b - a) / 1e6 for a, b in zip(at["death"], at[what][1:], strict=True)]
        cells.append(f"{statistics.median(gaps):.0f} ({min(gaps):.0f} to {max(gaps):.0f})")
    return " | ".join(cells)


def show_deaths(deaths: int) -> None:
    """Print the rows of processes that are killed."""
    print("\n| from a death | first line ms | imports | result |\n| --- | --- | --- | --- |")
    for imports in ("torch", *(["transformers"] if find_spec("transformers") else [])):
        for way in LIFE_S:
            print(f"| {imports}, {way} | {died(way, imports, deaths)} |", flush=True)


def alone_ms(imports: str) -> float:
    """Return the time from the start of a plain process of the search to its first trial."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time_ns()
        done = subprocess.run(
            [sys.executable, "-c", REPLACED, imports, "1"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    return (int(done.stdout.split("begin ")[1].split()[0]) - began) / 1e6


def replacing(imports: str, pairs: int) -> str:
    """Return a row: a start alone, from trial to trial, and what of that is imports."""
    alone = [alone_ms(imports) for _ in range(pairs)]
    gap, start, imported = replaced_ms(imports, pairs + 1)
    cells = (alone, gap, start, imported)
    return " | ".join(f"{statistics.median(cell):.0f}" for cell in cells)


def compare(measure, pairs: int) -> str:
    """Return a row: without the hook, and the median difference with it, wall and CPU."""
    plain, differences = [], []
    for number in range(pairs):
        found = {}
        for hooked in (False, True) if number % 2 else (True, False):
            found[hooked] = measure(hooked=hooked)
        plain.append(found[False])
        differences.append([b - a for a, b in zip(found[False], found[True], strict=True)])
    walls, cpus = zip(*plain, strict=True)
    more_wall, more_cpu = zip(*differences, strict=True)
    cells = [walls, more_wall, cpus, more_cpu]
    return " | ".join(f"{statistics.median(cell):.2f}" for cell in cells)


def main() -> None:
    if sys.argv[1:2] == ["died"]:
        show_deaths(5)
        return
    pairs, trials = (int(word) for word in (*sys.argv[1:3], *("7", "100")[len(sys.argv) - 1 :]))
    versions = f"Python {platform.python_version()}, optuna {version('optuna')}"
    print(f"{versions}, {os.cpu_count()} cores, {pairs} pairs of {trials} trials\n")
    print("| | wall ms | more | CPU ms | more |\n| --- | --- | --- | --- | --- |")
    for kind in ("sqlite", "journal"):
        row = compare(lambda kind=kind, **how: search_ms(kind, trials, **how), pairs)
        print(f"| a trial, {kind} | {row} |", flush=True)
    print(f"| import optuna | {compare(start_ms, pairs)} |")
    print("\n| | alone ms | replaced ms | from its start | of it imports |")
    print("| --- | --- | --- | --- | --- |")
    for imports in ("optuna", "torch"):
        print(f"| until the first trial, {imports} | {replacing(imports, pairs)} |", flush=True)
    show_deaths(5)


if __name__ == "__main__":
    main()
