"""The `optuna` and `memory` hooks in one process: errors, attributes, who may be replaced."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from cases import slow
from interpreters import SITE, Interpreters
from repo import PROGRAMS, source

from saferun.diagnosis import signatures
from saferun.inject.hooks import cuda_failures, cuda_words
from saferun.inject.hooks.optuna import script as script_calls

ON = {"optuna": {"mode": "on", "recycle_every": 50}}
REFUSED = "optuna: the process is not replaced after CUDA errors or trials: "
HEAD = source("inject/optuna_without_gpu")
PATH = f"{SITE}:{PROGRAMS / 'inject'}"  # for programs that import that head
MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB." + " and more" * 100


@pytest.mark.parametrize("catch", ["()", "(RuntimeError,)"])
def test_a_trial_out_of_memory_is_pruned_with_its_error_and_the_cache_cleared_around_gc(
    interpreters: Interpreters, catch: str
) -> None:
    script = f"""
def objective(trial):
    if trial.number == 0:
        raise OutOfMemoryError({MEMORY!r})
    return 1.0
study = optuna.create_study()
study.optimize(objective, n_trials=2, catch={catch})
print(calls)
show(study)
"""
    ran = interpreters.run(HEAD + script, hooks=ON)
    called, trials = ran.out.splitlines()
    attributes = {
        "cuda_error": True,
        "cuda_error_type": "OutOfMemoryError",
        "cuda_error_msg": MEMORY[:500],
    }
    assert json.loads(trials) == [["PRUNED", attributes], ["COMPLETE", {}]], ran.err
    assert called == "['empty', 'gc', 'empty', 'sync']"


def test_nothing_of_a_trial_out_of_memory_is_alive_when_the_cache_is_cleared(
    interpreters: Interpreters,
) -> None:
    ran = interpreters.run(source("inject/freed_trial"), hooks=ON, PYTHONPATH=PATH)
    assert ran.out == "True\nTrue\n", ran.err


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python puts the entry back")
def test_no_frame_of_ours_is_in_what_optuna_logs_and_raises(interpreters: Interpreters) -> None:
    script = """
import traceback
optuna.logging.set_verbosity(optuna.logging.WARNING)
def objective(trial):
    raise ValueError("the scripts own")
study = optuna.create_study()
for arguments in ((objective, 1), (objective, -1.5)):
    try:
        study.optimize(*arguments)
    except Exception as error:
        print("inject" in "".join(traceback.format_exception(error)))
"""
    hooks = {**ON, "memory": {"clear_between_trials": True}}
    ran = interpreters.run(HEAD + script, hooks=hooks)
    assert "in objective" in ran.err
    assert ("inject" in ran.err, "True" in ran.out) == (False, False), ran.err


def test_an_exception_that_is_no_cuda_error_is_the_scripts_own(interpreters: Interpreters) -> None:
    script = """
def objective(trial):
    raise RuntimeError("there is no device-side assert triggered in this sentence")
study = optuna.create_study()
study.optimize(objective, n_trials=2, catch=(RuntimeError,))
show(study)
study.optimize(objective, n_trials=1)
"""
    hooks = {**ON, "memory": {"clear_between_trials": True}}
    ran = interpreters.run(HEAD + script, hooks=hooks)
    assert json.loads(ran.out) == [["FAIL", {}]] * 2
    assert sys.version_info < (3, 11) or "/inject/" not in ran.err  # Python puts the frame back
    assert ran.code == 1
    assert ran.err.rstrip().endswith("there is no device-side assert triggered in this sentence")


@pytest.mark.parametrize(
    ("storage", "why"),
    [
        ("None", "the study is in memory"),
        ("'sqlite:///:memory:'", "the study is in memory"),
        ("'sqlite:///study.db'", "the trials' state cannot be kept"),
    ],
)
def test_where_the_process_cannot_be_replaced_one_line_says_why_and_the_error_is_the_scripts(
    interpreters: Interpreters, storage: str, why: str
) -> None:
    script = f"""
def objective(trial):
    if trial.number == 3:
        raise AcceleratorError("CUDA error: device-side assert triggered")
    return 1.0
study = optuna.create_study(storage={storage})
try:
    study.optimize(objective, n_trials=2)
    study.optimize(objective, n_trials=9)
finally:
    show(study)
"""
    ran = interpreters.run(HEAD + script, hooks=ON)
    assert ran.code == 1
    assert ran.err.count(REFUSED + why) == 1
    assert "torch.AcceleratorError: CUDA error: device-side assert triggered" in ran.err
    states = json.loads(ran.out)
    assert [state for state, _ in states] == ["COMPLETE"] * 3 + ["FAIL"]
    assert states[3][1]["cuda_error_type"] == "AcceleratorError"


def test_without_the_hook_optuna_is_as_it_is(interpreters: Interpreters) -> None:
    script = """
def objective(trial):
    raise OutOfMemoryError("CUDA out of memory")
optuna.create_study().optimize(objective, n_trials=2)
"""
    ran = interpreters.run(HEAD + script, hooks={})
    assert ran.code == 1
    assert "CUDA out of memory" in ran.err
    assert "saferun" not in ran.err


def test_between_trials_the_cache_is_cleared_where_the_profile_says_so(
    interpreters: Interpreters,
) -> None:
    script = """
seen = []
study = optuna.create_study()
study.optimize(lambda trial: 1.0, 2, None, 1, (), [lambda s, t: calls.append("own")])
study.optimize(lambda trial: 1.0, n_trials=1)
print(calls)
"""
    hooks = {"memory": {"clear_between_trials": True}}
    ran = interpreters.run(HEAD + script, hooks=hooks)
    cleared = ["empty", "gc", "empty"]
    assert ran.out == f"{['own', *cleared, 'own', *cleared, *cleared]}\n", ran.err


@pytest.mark.parametrize("on", [True, *slow(False)])
def test_the_scripts_own_clearing_collects_garbage_and_the_receipt_tells_what_it_freed(
    interpreters: Interpreters, on: bool
) -> None:
    hooks = {"memory": {"clear_between_trials": on}}
    ran = interpreters.run(source("inject/empty_own_cache"), hooks=hooks, RANK="0")
    calls = json.loads(ran.out)
    assert calls[:3] == (["empty", "gc", "empty"] if on else ["empty"] * 3), ran.err
    assert calls.count("empty") == 3 + calls.count("gc")
    first = [line for line in ran.by("memory", "observed") if line["clears"] == 1]
    assert [line["freed_mib"] for line in first[:1]] == [100] * on


def test_a_trial_of_a_helper_process_is_pruned_and_the_helper_is_not_replaced(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    text = json.loads(interpreters.contract(ON))
    text["state"] = str(tmp_path)
    environ = interpreters.environ(None, SAFERUN_INJECT=json.dumps(text), PYTHONPATH=PATH)
    ran = interpreters.run(source("inject/trials_of_a_fork"), environ=environ)
    status, trials = ran.out.splitlines()
    assert status == "0", ran.err
    assert [state for state, _ in json.loads(trials)] == ["FAIL"] * 3
    assert ran.err.count(REFUSED + "this is a process that the script started") == 1


@pytest.mark.parametrize(("hooks", "made"), [(ON, "made\n"), *slow(({}, ""))])
def test_tables_that_another_process_makes_at_the_same_time_are_no_failure(
    interpreters: Interpreters, hooks: dict[str, object], made: str
) -> None:
    """The other process makes them when this one has seen that there are none."""
    script = """
import os, subprocess, sys, sqlalchemy
from optuna.storages._rdb import models
make = "import optuna; optuna.storages.RDBStorage('sqlite:///study.db')"
def other(*_, **__):
    bare = {name: value for name, value in os.environ.items() if name != "SAFERUN_INJECT"}
    subprocess.run([sys.executable, "-c", make], env=bare, check=True)
sqlalchemy.event.listen(models.BaseModel.metadata, "before_create", other, once=True)
optuna.storages.RDBStorage("sqlite:///study.db")
print("made")
"""
    ran = interpreters.run(HEAD + script, hooks=hooks)
    assert ran.out == made, ran.err
    assert ("already exists" in ran.err) is (not made)


def by_position(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(**dict(zip(names, args, strict=False)), **kwargs)


def test_calls_by_position_as_before_optuna_5_are_not_made_again(tmp_path: Path) -> None:
    import optuna

    kept: dict[str, Any] = {}
    state: Any = SimpleNamespace(read=lambda name: kept.get(name, {}), write=kept.__setitem__)
    place = f"sqlite:///{tmp_path}/study.db"
    for name in ("new", "old"):
        optuna.create_study(study_name=name, storage=place)
    for deleted, left in ((["old"], ["new", "s"]), (["new", "old"], ["s", "old"])):  # two processes
        module = SimpleNamespace(
            create_study=by_position(
                optuna.create_study, "storage", "sampler", "pruner", "study_name"
            ),
            delete_study=by_position(optuna.delete_study, "study_name", "storage"),
            copy_study=optuna.copy_study,
            Study=SimpleNamespace(add_trial=optuna.Study.add_trial),
        )
        calls = script_calls.Script(state, HERE)
        script_calls.wrap(cast(ModuleType, module), calls, lambda study: False)
        for name in deleted:
            module.delete_study(name, place)
        assert module.create_study(place, None, None, "s").study_name == "s"
        assert optuna.get_all_study_names(place) == left
        optuna.create_study(study_name="old", storage=place, load_if_exists=True)
