"""Mitigations in real jobs: what the plan says is what torch does in the rank."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from releases import needs_torch
from repo import source

from saferun.knowledge import loader
from saferun.model import Identity, MachineFacts, Request
from saferun.planning import mitigation_catalog, mitigation_overlay
from saferun.planning.build import build_plan, conditions
from saferun.planning.torchrun import torchrun_args
from saferun.profile.merge import resolve
from saferun.profile.schema import Doc, Leaf
from saferun.supervise.changes import probes

pytestmark = [pytest.mark.slow, needs_torch("2.4", "any")]

SITE = str(Path(loader.__file__).parents[1] / "inject" / "site")
ALL = mitigation_catalog.load({"XDG_CACHE_HOME": "/proc/nowhere"})
DROPPED = ("SAFERUN_", "TORCH", "PET_", "PYTHON", "TRITON_", "COV_")
GROUP = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
DEADLINE_S = 500
TORCHRUN = {"launcher": Leaf("torchrun")}
PYTHON = {"launcher": Leaf("python")}


def run(
    folder: Path,
    script: str,
    *names: str,
    ranks: int = 0,
    answers: dict[str, str] | None = None,
    **exported: str,
) -> tuple[str, list[dict[str, Any]]]:
    """Run a script under an attempt's plan with these mitigations; return output and receipts."""
    path = folder / "train.py"
    path.write_text(script)
    program = str(Path(sys.executable).with_name("torchrun"))
    facts = MachineFacts(torch="2.13.0", launcher=(program,), python=sys.executable)
    argv = ("--standalone", f"--nproc-per-node={ranks}", str(path)) if ranks else (str(path),)
    line = torchrun_args.parse(argv).line
    request = Request(line=line, options=torchrun_args.launch_options(line, exported))
    doc = Doc("p.yaml", "p", "", (), (), TORCHRUN if ranks else PYTHON)
    at = conditions(request, facts, named=True, starts_all=False)
    profile = resolve([doc], (), at, origin="--profile")
    identity = Identity(SITE, "run", 2, str(folder / "receipts"))
    base = build_plan(request, profile, facts, exported, identity)
    here = mitigation_overlay.Situation(base, exported, facts.torch, answers or {})
    for place, name in enumerate(names):
        assert mitigation_overlay.refusal(ALL, name, names[:place], here) == ""
    changes = mitigation_overlay.changes(ALL, names, here)
    plan = build_plan(request, profile, facts, exported, identity, changes)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(DROPPED) and k not in GROUP}
    kept |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(
        plan.command,
        env=plan.environment({**kept, **exported}),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    files = sorted((folder / "receipts").glob("*.jsonl"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    return done.stdout, [json.loads(line) for line in lines]


EXPORTED = {
    "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
    "TORCHINDUCTOR_CUDAGRAPHS": "1",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
}
FAILS = "BackendCompilerFailed"


@pytest.mark.parametrize(
    ("names", "lowered", "broken"),
    [
        ((), [[True, True]], FAILS),
        (("autotune-off",), [[False, True]], FAILS),
        (("cudagraphs-off",), [[True, False]], FAILS),
        (("autotune-off", "cudagraphs-off"), [[False, False]], FAILS),
        (("compile-fallback",), [[True, True]], True),
        (("compile-off",), [], True),
    ],
    ids=["none", "autotune-off", "cudagraphs-off", "both", "compile-fallback", "compile-off"],
)
def test_the_compiler_obeys_a_mitigation_against_the_script_and_the_exported_variables(
    names, lowered, broken, tmp_path
):
    out, _ = run(tmp_path, source("inject/inductor_and_fallback"), *names, **EXPORTED)
    assert json.loads(out) == {"lowered": lowered, "broken": broken}


@pytest.mark.parametrize(
    ("mode", "names", "whole"),
    [
        ("true", (), False),
        ("true", ("ddp-optimizer-off",), True),
        ('"ddp_optimizer"', ("ddp-optimizer-off",), True),
    ],
    ids=["none", "mitigated", "mitigated by its other name"],
)
def test_without_ddps_optimizer_the_graph_stays_whole(mode, names, whole, tmp_path):
    out, receipts = run(tmp_path, source("inject/count_ddp_graphs"), *names, ranks=1, MODE=mode)
    assert (int(out.split()[1]) == 1) is whole, out
    reported = [line for line in receipts if line.get("part") == "ddp optimizer"]
    assert [line["outcome"] for line in reported] == (["applied", "observed"] if names else [])


def test_each_rank_gets_compile_caches_of_its_own_that_its_helpers_share(tmp_path):
    asked = probes.Probes({"TMPDIR": str(tmp_path)}, None)
    answers = asked.ask(["fresh-directory"], 2)
    base = Path(answers["fresh-directory"])
    old = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "old")}
    script = source("inject/show_caches")
    out, receipts = run(tmp_path, script, "fresh-compile-cache", ranks=2, answers=answers, **old)
    wanted = {f"{base}/rank{n}/inductor {base}/rank{n}/triton" for n in (0, 1)}
    lines = [line.split(" ", 1) for line in out.splitlines()]
    assert sorted(kind for kind, _ in lines) == ["helper", "helper", "rank", "rank"]
    assert {paths for kind, paths in lines if kind == "rank"} == wanted
    assert {paths for kind, paths in lines if kind == "helper"} == wanted
    for rank in (0, 1):
        folder = base / f"rank{rank}"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert any((folder / "inductor").iterdir())
    assert not (tmp_path / "old").exists()
    reported = [line["rank"] for line in receipts if line.get("part") == "caches"]
    assert sorted(reported) == [0, 1]
    asked.close()
    assert not base.exists()
