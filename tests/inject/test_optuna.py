"""The `optuna` and `memory` hooks in one process: errors, attributes, who may be replaced."""

import gc
import json
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from cases import check_cases, slow
from interpreters import SITE
from repo import PROGRAMS, RECORDS, read_yaml, source, tool

from saferun.diagnosis import signatures
from saferun.diagnosis.deciding import classify
from saferun.diagnosis.evidence import Evidence
from saferun.diagnosis.reading import log_reader
from saferun.inject.hooks import cuda_failures
from saferun.inject.hooks.optuna import script as script_calls
from saferun.inject.hooks.optuna.sampler import reseed

ON = {"optuna": {"mode": "on", "recycle_every": 50}}
REFUSED = "optuna: the process is not replaced after CUDA errors or trials: "
HEAD = source("inject/optuna_without_gpu")
HERE: Any = SimpleNamespace(guard=lambda hook, step, *args: step(*args))
PATH = f"{SITE}:{PROGRAMS / 'inject'}"  # for programs that import that head
MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB." + " and more" * 100


@pytest.mark.parametrize("catch", ["()", "(RuntimeError,)"])
def test_a_trial_out_of_memory_is_pruned_with_its_error_and_the_cache_cleared_around_gc(
    interpreters, catch
):
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
        "cuda_error_msg": f"{MEMORY[:500].rsplit(None, 1)[0]} …",  # no word is cut
    }
    assert json.loads(trials) == [["PRUNED", attributes], ["COMPLETE", {}]], ran.err
    assert called == "['sync', 'empty', 'gc', 'empty', 'sync']"


def test_nothing_of_a_trial_out_of_memory_is_alive_when_the_cache_is_cleared(interpreters):
    ran = interpreters.run(source("inject/freed_trial"), hooks=ON, PYTHONPATH=PATH)
    assert ran.out == "True\nTrue\n", ran.err


def test_an_exception_that_is_no_cuda_error_is_the_scripts_own(interpreters):
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


def test_a_trial_whose_labels_a_guard_refuses_is_pruned_as_one_whose_kernel_asserts(interpreters):
    script = """
import optuna, torch
optuna.logging.set_verbosity(optuna.logging.ERROR)
def objective(trial):
    return torch.nn.functional.cross_entropy(torch.zeros(1, 3), torch.tensor([trial.number])).item()
study = optuna.create_study()
study.optimize(objective, n_trials=4)
print([trial.state.name for trial in study.trials])
"""
    ran = interpreters.run(script, hooks={**ON, "guards": {"labels": "on"}})
    assert ran.out == "['COMPLETE', 'COMPLETE', 'COMPLETE', 'PRUNED']\n", ran.err


@pytest.mark.parametrize(
    ("storage", "why"),
    [
        ("None", "the study is in memory"),
        ("'sqlite:///study.db'", "the trials' state cannot be kept"),
        *slow(("'sqlite:///:memory:'", "the study is in memory")),
    ],
)
def test_where_the_process_cannot_be_replaced_one_line_says_why_and_the_error_is_the_scripts(
    interpreters, storage, why
):
    script = f"""
def objective(trial):
    if trial.number == 3:
        poison()
        raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`")
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
    assert "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED" in ran.err
    states = json.loads(ran.out)
    assert [state for state, _ in states] == ["COMPLETE"] * 3 + ["FAIL"]
    assert states[3][1]["cuda_error_type"] == "RuntimeError"
    assert "\nAcceleratorError: CUDA error: device-side" in states[3][1]["cuda_error_msg"]


def test_without_the_hook_optuna_is_as_it_is(interpreters):
    script = """
def objective(trial):
    raise OutOfMemoryError("CUDA out of memory")
optuna.create_study().optimize(objective, n_trials=2)
"""
    ran = interpreters.run(HEAD + script, hooks={})
    assert (ran.code, ran.messages()) == (1, [])
    assert "CUDA out of memory" in ran.err


def test_between_trials_the_cache_is_cleared_where_the_profile_says_so(interpreters):
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
    interpreters, on
):
    hooks = {"memory": {"clear_between_trials": on}}
    ran = interpreters.run(source("inject/empty_own_cache"), hooks=hooks, RANK="0")
    calls = json.loads(ran.out)
    assert calls[:3] == (["empty", "gc", "empty"] if on else ["empty"] * 3), ran.err
    assert calls.count("empty") == 3 + calls.count("gc")
    first = [line for line in ran.by("memory", "observed") if line["clears"] == 1]
    assert [line["freed_mib"] for line in first[:1]] == [100] * on


def test_a_trial_of_a_helper_process_is_pruned_and_the_helper_is_not_replaced(
    interpreters, tmp_path
):
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
    interpreters, hooks, made
):
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


def by_position(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(**dict(zip(names, args, strict=False)), **kwargs)


# Python 3.13 says that nobody closed what optuna has given back to its pool.
@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
def test_calls_by_position_as_before_optuna_5_are_not_made_again(tmp_path):
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
    gc.collect()  # and not during another test


NO_ENGINE = "GET was unable to find an engine to execute this computation"
HANDLE = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"


def test_the_words_of_the_hook_are_those_of_the_knowledge():
    words = tool("cuda_words")
    assert words.FILE.read_text(encoding="utf-8") == words.text(), "run tools/cuda_words.py"


def out_of_memory_texts() -> list[str]:
    """Every recorded text whose diagnosis is a GPU that is out of memory: its deciding line."""
    found = []
    for name in ("kinds", "wordings"):
        rows = read_yaml((RECORDS / "failures" / f"{name}.yaml").read_text(encoding="utf-8"))
        found += [row for row in rows if row["kind"].startswith("cuda-oom")]
    knowledge = signatures.load()
    lines = []
    for row in found:
        log = row.get("log") or row.get("line") or ""
        evidence = Evidence(log=log_reader.of_text(log))
        lines.append(classify.classify(evidence, knowledge).root_line)
    signs = [one for one in knowledge.signs if one.kind.startswith("cuda-oom")]
    says = (" x ".join([*parts, *one.near[:1]]) for one in signs for parts in one.says)
    return [*lines, *(f"RuntimeError: {text}" for text in says)]


def test_whatever_diagnoses_as_out_of_memory_is_out_of_memory_for_the_hook():
    texts = out_of_memory_texts()
    assert len(texts) > 60
    for text in texts:
        name, found, message = text.partition(": ")
        bare = name.rpartition(".")[2]
        kind = type(bare if found and bare.isidentifier() else "RuntimeError", (RuntimeError,), {})
        kind.__module__ = "torch"
        error = kind(message if kind.__name__ == bare else text)
        assert cuda_failures.is_memory(error), text


class OutOfMemoryError(RuntimeError):
    """torch's, by its name and module."""

    __module__ = "torch"


SOLVER = "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `f(handle)`"
UNSURE = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
JUDGED = [  # on a context that works; GiB that are free, and that torch keeps of what was let go
    (RuntimeError("Triton Error [CUDA]: out of memory"), 40, 0, "passing cuda-oom"),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), 40, 0, "passing cuda-oom"),
    (RuntimeError(NO_ENGINE), 40, 0, " "),  # the wrong dtype, say
    (RuntimeError(NO_ENGINE), 1, 0, "passing cuda-oom"),
    (RuntimeError(HANDLE), 1, 0, "passing cuda-oom"),
    (RuntimeError(HANDLE), 40, 0, "unclear cublas-cudnn-failed"),
    (UNSURE, 1, 0, "passing cuda-oom"),
    # torch's own allocator empties the cache before it gives up; cuSOLVER asks the driver.
    (UNSURE, 1, 20, "unclear cuda-oom"),
    (RuntimeError(SOLVER), 1, 0, "passing cuda-oom"),
    (RuntimeError(SOLVER), 1, 20, "unclear cuda-oom"),
    (OutOfMemoryError(MEMORY), 1, 20, "passing cuda-oom"),
    (RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR"), 40, 0, "unclear cublas-cudnn-failed"),
    (RuntimeError("Triton Error [CUDA]: invalid argument"), 40, 0, "unclear cublas-cudnn-failed"),
    (ValueError("mat1 and mat2 shapes cannot be multiplied"), 40, 0, " "),
]


def test_on_a_context_that_works_the_text_and_the_free_memory_decide(monkeypatch):
    def check(error: Exception, free_gib: int, cached_gib: int, expected: str) -> None:
        cuda = SimpleNamespace(
            is_initialized=lambda: True,
            device_count=lambda: 1,
            synchronize=lambda device: None,
            mem_get_info=lambda: (free_gib << 30, 80 << 30),
            memory_reserved=lambda: (40 + cached_gib) << 30,
            memory_allocated=lambda: 40 << 30,
        )
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        assert " ".join(cuda_failures.judged(error)) == expected
        if isinstance(error, OutOfMemoryError):
            wrapped = ValueError("this layer failed")
            wrapped.__cause__ = error
            assert " ".join(cuda_failures.judged(wrapped)) == expected

    check_cases(JUDGED, check)


def test_without_a_context_of_torchs_the_text_tells_what_is_hidden():
    hidden = ValueError("this trial is not good")
    hidden.__context__ = RuntimeError("CUDA error: misaligned address")
    assert cuda_failures.judged(hidden) == (cuda_failures.UNUSABLE, "cuda-launch-failure")


@pytest.mark.slow
def test_a_rank_that_the_objective_spawned_counts_as_its_own():
    """What torch.multiprocessing.spawn raises has the rank's traceback as its text."""
    spawn = pytest.importorskip("torch.multiprocessing.spawn")
    text = "-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n"
    text += f"torch.OutOfMemoryError: {MEMORY}\n"
    handled = "\nDuring handling of the above exception, another exception occurred:\nKeyError: 'x'"
    for ending, expected in (("", True), (handled, False)):
        error = spawn.ProcessRaisedException(text + ending, 1, 7)
        assert cuda_failures.is_memory(error) is expected


@pytest.mark.parametrize("name", ["RandomSampler", "TPESampler", "NSGAIISampler"])
def test_a_fresh_process_has_a_seed_of_its_own_which_the_given_one_and_the_trials_make(name):
    import optuna

    drawn = []
    for trials in (0, 7, 7, 8):
        sampler = getattr(optuna.samplers, name)(seed=3)
        if trials:
            reseed(sampler, trials)
        study = optuna.create_study(sampler=sampler)
        study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=3)
        drawn.append([trial.params["x"] for trial in study.trials])
    assert drawn[1] == drawn[2]
    assert len({tuple(one) for one in drawn}) == 3
