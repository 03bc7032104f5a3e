"""What a run learned is kept where it can be; where not, that costs one line and not the run."""

import os
import sys
import time
from pathlib import Path

from saferun.inject import contract
from saferun.journal import mitigation_history
from saferun.journal.receipts import Receipt
from saferun.planning import inputs, request
from saferun.supervise.changes.mitigations import RunMitigations


def gathered_for(folder: Path, *words: str, launcher: str = "python") -> inputs.RunInputs:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {"HOME": str(folder), "PATH": path, "TMPDIR": "/proc/nowhere"}
    argv = ["--profile=cpu", f"--set=launcher={launcher}", *words]
    return inputs.gather(request.read(argv, environ), environ, str(folder))


def test_what_one_run_has_learned_the_next_run_of_the_script_begins_with(tmp_path, capsys):
    gathered = gathered_for(tmp_path, "/w/train.py", "--lr", "1")
    first = RunMitigations(gathered, gathered.plan(), "")
    assert first.recall(gathered) == ""
    assert first.usable(gathered, "autotune-off", ())
    first.add("autotune-off", "segfault")
    changed = first.plan(gathered)
    assert changed.mitigations == ("autotune-off",)
    (tmp_path / ".local").touch()
    first.learn(gathered, changed)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("saferun: the mitigation that helped is not kept for the next run: ")
    assert line.endswith(": its directory cannot be used")
    (tmp_path / ".local").unlink()
    assert "compile.autotune=off; cost:" in first.describe(first.in_force)
    first.learn(gathered, changed)
    (entry,) = mitigation_history.load(gathered.environ)
    assert (entry.key.script, entry.key.gpu) == ("/w/train.py", "")
    assert entry.arguments == ("--lr", "1"), "it costs"
    (before,) = mitigation_history.change(
        gathered.environ, lambda kept: tuple(e._replace(at=e.at - 90_000.0) for e in kept)
    )
    second = RunMitigations(gathered, gathered.plan(), "")
    day = time.strftime("%Y-%m-%d", time.localtime(before.at - 90_000.0))
    assert second.recall(gathered) == (
        f"from the history: autotune-off (it helped against segfault on {day}); "
        "`saferun runs mitigations clear` forgets it"
    )
    assert second.plan(gathered).mitigations == ("autotune-off",)
    for words in (
        ["/w/other.py"],
        ["-m", "train"],
        ["--set=mitigate.remember=false", "/w/train.py"],
    ):
        other = gathered_for(tmp_path, *words)
        assert RunMitigations(other, other.plan(), "").recall(other) == ""
    first.add("expandable-segments", "cuda-oom")
    first.learn(gathered, first.plan(gathered))
    kept = {
        entry.mitigation: entry.arguments for entry in mitigation_history.load(gathered.environ)
    }
    assert kept == {"autotune-off": ("--lr", "1"), "expandable-segments": None}, "one is free"


def test_each_attempt_has_a_fresh_rendezvous_and_all_have_one_cache(tmp_path):
    gathered = gathered_for(tmp_path, "/w/train.py", launcher="torchrun")
    run = RunMitigations(gathered, gathered.plan(), str(tmp_path))
    run.add("fresh-rendezvous", "port-in-use")
    run.add("fresh-compile-cache", "inductor-cache-race")
    plans = [
        run.plan(gathered._replace(identity=gathered.identity._replace(attempt=attempt)))
        for attempt in (1, 2)
    ]
    run.close()
    assert plans[0].torchrun_args != plans[1].torchrun_args
    (cache,) = {plan.env["TRITON_CACHE_DIR"].value for plan in plans}
    assert Path(cache).parent == tmp_path


def test_a_module_that_a_rank_loaded_past_its_hook_stays_missed(tmp_path):
    gathered = gathered_for(tmp_path, "/w/train.py")
    run = RunMitigations(gathered, gathered.plan(), "")
    run.add("autotune-off", "segfault")
    for module in ("torch._inductor.compile_fx", "torch._dynamo.convert_frame"):
        facts = {"targets": {module: contract.MISSED}}
        receipt = Receipt(7, 0, 0, 1.0, contract.TARGETS, "", facts)
        run.read_receipts([receipt], ranks_seen=True)
        assert run.in_force == ()
    assert not run.usable(gathered, "autotune-off", ())
