"""A failure goes away because the loop changed the one setting that caused it."""

import json
import resource
from pathlib import Path

import pytest
from helpers import taken_port
from runs import PROGRAMS, ran, small_torchrun
from sandbox import write

HUNGRY = "files = [open('/dev/null') for _ in range(400)]; print('opened')\n"
# The message is torch's; only a GPU makes torch write it by itself.
STRAY = """
import os
for step in range(1, {steps} + 1):
    print(f"step {{step}} loss 1.0", flush=True)
if os.environ["SAFERUN_ATTEMPT"] == "1":
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""


def limited() -> None:
    """Lower this process's limit of open files, and leave room to raise it again."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))


def written(folder: Path, text: str) -> str:
    return str(write(folder / "t.py", text))


@pytest.mark.slow
def test_a_port_that_is_taken_is_left_for_a_free_one(tmp_path):
    script = written(tmp_path, "print('met', flush=True)\n")  # torchrun itself listens at the port
    argv = ["--nproc-per-node=2", script]
    with taken_port() as port:
        job = ran(tmp_path, f"--master-port={port}", *argv)
    assert job.out.count("met") == 2
    assert "free-port" in job.err
    assert [e["add"] for e in job.events("ended")] == ["free-port", ""]


@pytest.mark.slow
def test_mitigations_can_be_switched_off_and_the_advice_remains(tmp_path):
    script = written(tmp_path, "print('met')\n")
    argv = ["--set", "mitigate.enabled=false", script]
    with taken_port() as port:
        job = ran(tmp_path, f"--master-port={port}", *argv, status=1)
    assert len(job.events("ended")) == 1
    assert any("port-in-use" in line for line in job.messages()), job.err
    assert "mitigations are switched off" in job.err
    assert "--master-port" in job.err


def test_a_limit_of_open_files_is_raised_and_the_next_run_starts_with_that(tmp_path):
    script, env = written(tmp_path, HUNGRY), small_torchrun(tmp_path)
    first = ran(tmp_path, script, env=env, preexec_fn=limited)
    assert first.out == "opened\n"
    assert [e["add"] for e in first.events("ended")] == ["more-open-files", ""]
    (history,) = first.home.glob(".local/state/saferun/mitigations.json")
    mitigations = json.loads(history.read_text(encoding="utf-8"))["mitigations"]
    assert [entry["mitigation"] for entry in mitigations] == ["more-open-files"]
    second = ran(tmp_path, script, env=env, preexec_fn=limited)
    assert second.out == "opened\n"
    assert "from the history: more-open-files" in second.err
    assert "attempt 1 failed" not in second.err


def test_a_limit_of_processes_is_raised_for_the_next_attempt(tmp_path):
    """The message is Python's; the kernel refuses root no process."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    low = most // 2
    script = (
        f"import resource\nsoft = resource.getrlimit(resource.RLIMIT_NPROC)[0]\nif soft == {low}:\n"
    )
    script += '    raise RuntimeError("can\'t start new thread")\nprint(soft)\n'

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NPROC, (low, hard))

    job = ran(tmp_path, written(tmp_path, script), env=small_torchrun(tmp_path), preexec_fn=limited)
    assert job.out == f"{most}\n"
    assert [e["add"] for e in job.events("ended")] == ["more-processes", ""]


@pytest.mark.parametrize(("steps", "attempts"), [(600, 2), (5, 1)], ids=["late", "early"])
def test_a_stray_access_is_tried_again_only_where_many_steps_went_well(tmp_path, steps, attempts):
    script = written(tmp_path, STRAY.format(steps=steps))
    job = ran(tmp_path, script, env=small_torchrun(tmp_path), status=0 if attempts == 2 else 1)
    assert len(job.events("ended")) == attempts


# The message is what torch 2.11 prints of a kernel whose graph came from the cache.
COMPILED = """
import os, pathlib, sys
print("attempt", os.environ["SAFERUN_ATTEMPT"], "with", os.environ["SAFERUN_MITIGATIONS"])
cache = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
(cache / "fxgraph/ab/of-this-attempt").mkdir(parents=True, exist_ok=True)
if "fresh-compile-cache" in os.environ["SAFERUN_MITIGATIONS"] or len(sys.argv) > 1:
    sys.exit()
try:
    exec(compile("raise RuntimeError('CUDA driver error: invalid argument')",
         "/e/torch/_inductor/runtime/static_cuda_launcher.py", "exec"))
finally:
    (cache / "fxgraph/ab/later").mkdir(exist_ok=True)
"""


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_a_cache_that_the_attempt_has_not_filled_is_left_before_autotuning_is(tmp_path, warm):
    cache = tmp_path / "cache"
    if warm:
        (cache / "fxgraph" / "ab" / "of-another-run").mkdir(parents=True)
    env = {**small_torchrun(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    job = ran(tmp_path, written(tmp_path, COMPILED), env=env)
    first, *_ = job.events("ended")
    assert first["kind"] == "triton-launch-error"
    assert first["add"] == ("fresh-compile-cache" if warm else "autotune-off")
    # What the first attempt has compiled is old for the second one.
    assert job.out.splitlines()[-1].endswith("fresh-compile-cache")


BYPASSED = {
    "1": ["attempt 1 with", "attempt 2 with compile-off"],
    "2": ["attempt 1 with", "attempt 2 with autotune-off", "attempt 3 with compile-off"],
}


@pytest.mark.parametrize("since", BYPASSED)
def test_a_mitigation_whose_hook_is_bypassed_is_not_taken_for_tried(tmp_path, since):
    script = str(PROGRAMS / "past_the_hooks.py")
    # A cache of the user's that is older than the run would be suspected first.
    env = {**small_torchrun(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    job = ran(tmp_path, script, since, env=env)
    assert job.out.splitlines() == BYPASSED[since]
    past = "triton_heuristics: loaded past saferun, or changed by the script, in rank 0"
    assert job.err.count(past) == int(since == "2"), job.err
    history = job.home / ".local" / "state" / "saferun" / "mitigations.json"
    helped = json.loads(history.read_text(encoding="utf-8"))["mitigations"]
    assert [entry["mitigation"] for entry in helped] == ["compile-off"]
