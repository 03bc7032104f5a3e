"""What a study's storage and a run's record say of its trials."""

import collections
import json
from pathlib import Path
from typing import Any


def stored(folder: Path, kind: str) -> list[Any]:
    """The trials of the only study in a folder, as the storage has them."""
    import optuna
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if kind == "journal":
        backend = JournalFileBackend(str(folder / "study.log"))
        return optuna.load_study(study_name=None, storage=JournalStorage(backend)).get_trials()
    storage = RDBStorage(f"sqlite:///{folder}/study.db")
    trials = optuna.load_study(study_name=None, storage=storage).get_trials()
    storage.remove_session()
    storage.engine.dispose()
    return trials


def recorded(job: Any) -> list[dict[str, Any]]:
    lines = (job.journal / "state" / "trials.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def check_account(trials: list[Any], records: list[dict[str, Any]]) -> None:
    """Every trial is finished, has one record, and one that failed says why."""
    states = collections.Counter(trial.state.name for trial in trials)
    assert set(states) <= {"COMPLETE", "PRUNED", "FAIL"}, states
    assert sorted(record["number"] for record in records) == [trial.number for trial in trials]
    by_number = {record["number"]: record for record in records}
    assert all(by_number[trial.number]["state"] == trial.state.name for trial in trials)
    assert all(record["cause"] for record in records if record["state"] != "COMPLETE")
