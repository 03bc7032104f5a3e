"""What hooks meet that is odd: the job does what it does without them, plus one line at most."""

import pytest
from cases import few
from interpreters import SITE
from repo import source

from saferun.inject.targets import TARGETS

ALL = {
    "compile": {"enabled": "off", "autotune": "off", "cudagraphs": "off", "fallback": "on"},
    "cudagraph_markers": "off",
    "excepthook": "on",
    "guards": dict.fromkeys(("labels", "logits", "embeddings", "compiled"), "on"),
    "init": {"barrier": "store"},
    "memory": {"clear_between_trials": True},
    "optuna": {"mode": "on"},
    "order": {"mode": "fix"},
    "shards": "warn",
    "tensorflow": {"cross_device_ops": "hierarchical-copy", "memory_growth": True},
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_release_that_lacks_all_patched_names_costs_a_line_for_a_hook_at_most(
    interpreters, target
):
    parts = target.split(".")
    for depth in range(1, len(parts)):
        package = interpreters.folder.joinpath(*parts[:depth])
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
    interpreters.folder.joinpath(*parts).with_suffix(".py").touch()
    ran = interpreters.run(
        f"import {target}; print('done')", hooks=ALL, PYTHONPATH=f"{SITE}:{interpreters.folder}"
    )
    assert (ran.code, ran.out) == (0, "done\n"), ran.err
    lines = ran.err.splitlines()
    names = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    assert len(lines) <= sum(len(TARGETS.get(name, ())) for name in names), ran.err
    assert all(line.startswith("saferun: inject: hook ") for line in lines)


CASES = {  # what a rank prints, and the lines of saferun's in the whole job
    "odd_batches": ("40 batches", 0),
    "batches_of_generators": ("40 batches", 0),
    "iter_raises": ("ValueError: no data today", 0),
    "generator_raises": ("KeyError: 'row 9'", 0),
    "one_batch_on_a_rank": ("1 or 40 batches", 0),
    "patched_before": ("40 seen", 1),  # the ranks do read the same
    "patched_meanwhile": ("40 seen", 1),
    "store_went_away": ("40 batches", 1),
}


@pytest.mark.parametrize(
    "case", few({case: case for case in CASES}, "batches_of_generators", "store_went_away")
)
def test_odd_loaders_batches_and_stores_are_the_jobs_own_affair(run_ranks, case):
    said, lines = CASES[case]
    job = run_ranks(source("inject/odd_loaders"), environ={"CASE": case}, shards="warn")
    assert job.code == 0, job.err
    assert job.out.splitlines() == [said, said], job.err
    assert len(job.messages()) <= lines * 2, job.err
