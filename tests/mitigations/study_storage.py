"""Run three trials; in the second one the study's storage cannot be written, once.

study_storage.py locked: another process has the lock of the database. full: no file may grow.
"""

import resource
import signal
import subprocess
import sys

import optuna
from once import first_time

HOLD = """
import sqlite3
connection = sqlite3.connect("study.db", timeout=60)
connection.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
input()
"""


def objective(trial):
    if trial.number == 1 and first_time():
        if sys.argv[1] == "locked":
            command = [sys.executable, "-c", HOLD]
            pipe = subprocess.PIPE
            holders.append(subprocess.Popen(command, stdin=pipe, stdout=pipe))
            holders[0].stdout.readline()
        else:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    return trial.suggest_float("x", 0, 1)


holders = []
study = optuna.create_study(storage="sqlite:///study.db", study_name="s", load_if_exists=True)
study.optimize(objective, n_trials=3)
print("searched", flush=True)
