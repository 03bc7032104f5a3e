"""A search whose trials fail in every way that ends one; the same search without faults.

    search.py STORAGE SAMPLER TRIALS [WAYS]

STORAGE is `sqlite` or `journal`, in the working directory, or the address of a PostgreSQL database,
where `full` is a connection that the server ends. WAYS are the faults, by default none.
`memory`, `assert` and `crash` belong to regions of the parameters and come whenever these are
sampled; without such a fault a trial of that region ends as it is meant to end in the storage. The
others strike a trial once: `kill` and `term` the process, `locked` and `full` the storage. At the
end the script prints what it found, as JSON.
"""

import hashlib
import json
import os
import resource
import signal
import sqlite3
import sys

import optuna
import sqlalchemy
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

kind, sampler, trials = sys.argv[1], sys.argv[2], int(sys.argv[3])
ways = sys.argv[4].split(",") if len(sys.argv) > 4 else []
ONCE = (  # each a hundredth
    *("kill", "kill", "full", "locked", "kill", "term"),
    *("term", "term", "term", "locked", "locked", "full"),
)
POINTS = range(21)
held = []  # a lock on the database, until the process ends
optuna.logging.set_verbosity(optuna.logging.ERROR)


class CrashedError(Exception):
    """What a trial that crashes its process is without the crash: failed."""


def chance(params: dict) -> int:
    """A number below 100 that belongs to the parameters."""
    return int(hashlib.sha256(repr(sorted(params.items())).encode()).hexdigest(), 16) % 100


def is_first(name: str) -> bool:
    try:
        os.close(os.open(f"struck-{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def region(x: float, n: int) -> None:
    """The faults of parameters."""
    message = {
        "memory": "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "assert": "CUDA error: device-side assert triggered",
    }
    way = {20: "memory", 19: "assert", 18: "crash"}.get(n, "")
    if way == "crash" and x > 0:
        if way in ways:
            os.kill(os.getpid(), signal.SIGSEGV)
        raise CrashedError
    if way in message:
        if way in ways:
            raise RuntimeError(message[way])
        raise optuna.TrialPruned


def strike(trial: optuna.Trial) -> None:
    """The faults that come once."""
    number = chance(trial.params)
    way = ONCE[number] if number < len(ONCE) else ""
    if way not in ways or not is_first(f"{way}-{number}-{trial.params}"):
        return
    if way in ("kill", "term"):
        os.kill(os.getpid(), signal.SIGKILL if way == "kill" else signal.SIGTERM)
    elif kind == "sqlite" and way == "locked":
        engine = trial.storage._backend.engine  # it has several connections
        sqlalchemy.event.listen(engine, "checkout", at_once)
        held.append(sqlite3.connect("study.db", timeout=60))
        held[-1].execute("BEGIN EXCLUSIVE")
    elif "://" in kind:
        strike_server(trial.storage._backend.engine, way)
    else:  # no file of this process grows any more
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def at_once(connection: sqlite3.Connection, *_: object) -> None:
    connection.execute("PRAGMA busy_timeout = 1")


def strike_server(engine: sqlalchemy.Engine, way: str) -> None:
    own = engine.connect()
    if way == "locked":
        own.exec_driver_sql("LOCK TABLE trials IN ACCESS EXCLUSIVE MODE")
        held.append(own)
        sqlalchemy.event.listen(engine, "begin", lambda c: c.exec_driver_sql("SET lock_timeout=99"))
        return
    others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid != pg_backend_pid()"
    own.exec_driver_sql(f"{others} AND application_name = '{os.getpid()}'")
    own.close()


def objective(trial: optuna.Trial) -> float:
    x = trial.suggest_categorical("x", [point / 4 - 2.5 for point in POINTS])
    n = trial.suggest_int("n", 1, len(POINTS) + 3)
    region(x, n)
    strike(trial)
    return (x - 1.25) ** 2 + n / 100


def storage() -> object:
    if kind == "sqlite":
        return RDBStorage("sqlite:///study.db", engine_kwargs={"connect_args": {"timeout": 60}})
    if "://" in kind:
        named = {"connect_args": {"application_name": str(os.getpid())}}
        return RDBStorage(kind, engine_kwargs=named)
    return JournalStorage(JournalFileBackend("study.log"))


def main() -> None:
    grid = {"x": [point / 4 - 2.5 for point in POINTS], "n": list(range(1, len(POINTS) + 4))}
    samplers = {
        "tpe": lambda: optuna.samplers.TPESampler(seed=7),
        "random": lambda: optuna.samplers.RandomSampler(seed=7),
        "grid": lambda: optuna.samplers.GridSampler(grid),
    }
    study = optuna.create_study(
        storage=storage(),
        study_name="search",
        sampler=samplers[sampler](),
        load_if_exists=sampler == "grid",  # several processes share it
    )
    study.optimize(objective, n_trials=trials, catch=(CrashedError,))
    found = [[t.params, t.value] for t in study.trials if t.state.name == "COMPLETE"]
    print(json.dumps({"best": study.best_value, "completed": found}))


main()
