"""Two threads find the same trial in the queue: neither takes it before both have looked."""

import contextlib
import threading

import optuna
import sqlalchemy

optuna.logging.set_verbosity(optuna.logging.ERROR)
together = threading.Barrier(2)


def has_looked(connection, cursor, statement, parameters, context, executemany):
    if statement.startswith("SELECT") and "trials.trial_id = ?" in statement:
        with contextlib.suppress(threading.BrokenBarrierError):  # the other one may not look now
            together.wait(timeout=2)


study = optuna.create_study(study_name="s", storage="sqlite:///study.db")
study.enqueue_trial({"x": 0.5})
engine = study._storage._backend.engine
sqlalchemy.event.listen(engine, "after_cursor_execute", has_looked)
study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2, n_jobs=2)
