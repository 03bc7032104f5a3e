"""saferun in an environment without torch, as notebooks, submitit and installers use it.

`make test-ecosystem` makes that environment; torch is in the one that runs the tests.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from helpers import MARK, living, until
from repo import PROGRAMS, ROOT
from sandbox import text_of, write

pytestmark = pytest.mark.ecosystem
APART = ROOT / ".venv-ecosystem" / "bin"
WITH_RAY = ROOT / ".venv-ray" / "bin"
TORCH = Path(sys.executable).parent
RANK = (
    "import os, sys, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\n"
    "dist.barrier()  # or one may leave while the other still connects\n"
    "line = f'{sys.executable} {dist.get_world_size()}\\n'\n"
    "os.write(1, line.encode())  # in one piece: torchrun gives its ranks -u\n"
    "dist.destroy_process_group()\n"
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    shutil.copy(PROGRAMS / "ecosystem" / "job.py", tmp_path)
    write(tmp_path / "rank.py", RANK)
    return tmp_path


def ran(place: Path, *argv: object, path: str = str(APART), **environ: str) -> str:
    """Run a program of that environment in a directory, which is its home, too; return stdout."""
    done = subprocess.run(
        [str(word) for word in argv],
        cwd=place,
        env={
            # A kernel below pytest does not read its own descriptors.
            **{name: os.environ[name] for name in os.environ if name != "PYTEST_CURRENT_TEST"},
            "HOME": str(place),
            "PATH": f"{path}:{TORCH}:/usr/bin:/bin",
            **environ,
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_notebook_shows_the_output_and_its_stop_button_ends_the_run(place):
    mark = uuid.uuid4().hex
    program = PROGRAMS / "ecosystem" / "notebook.py"
    out = ran(place, APART / "python", program, place, **{MARK: mark})
    raised, first, third = map(json.loads, out.splitlines()[-3:])
    assert raised == {"raised": "KeyboardInterrupt"}
    streams = {one["name"]: one["text"] for one in first if one["output_type"] == "stream"}
    assert streams["stdout"] == "the job's line\n"
    assert streams["stderr"].startswith("saferun: profile ")
    assert first[-1]["data"]["text/plain"] == "0"
    assert third[0]["data"]["text/plain"] == "'still alive'"
    until(lambda: not living(mark), "processes are left")


def beside_torch(place: Path, *argv: object, **environ: str) -> str:
    """Run a program of torch's Python, which also finds the packages of that environment."""
    (packages,) = APART.parent.glob("lib/python*/site-packages")
    return ran(place, sys.executable, *argv, PYTHONPATH=str(packages), **environ)


def launch_json() -> dict[str, Any]:
    """Return the configuration for VS Code in docs/tools.md."""
    text = text_of(ROOT / "docs" / "tools.md")
    (block,) = re.findall(r"```json\n(.*?launch.*?)```", text, re.DOTALL)
    (found,) = json.loads(block)["configurations"]
    return dict(found)


@pytest.mark.parametrize("disable", ["", "1"], ids=["supervised", "disabled"])
def test_an_editor_stops_at_a_breakpoint_in_a_rank_and_steps_over_it(place, disable):
    script = place / "train.py"
    write(script, "import os\nvalue = int(os.environ['RANK'])\nvalue += 10\nprint('end')\n")
    launch = {**launch_json(), "cwd": str(place), "console": "internalConsole"}
    launch["args"] = [word.replace("${file}", str(script)) for word in launch["args"]]
    client = PROGRAMS / "ecosystem" / "debug_client.py"
    environ = {"PYDEVD_DISABLE_FILE_VALIDATION": "1", "SAFERUN_DISABLE": disable}
    out = beside_torch(place, client, json.dumps(launch), script, 3, **environ)
    lines = out.splitlines()
    assert lines[-1] == "exited 0", out
    stops = [line for line in lines if line.endswith("rank '1'")]
    assert stops == ["breakpoint train.py:3 rank '1'", "step train.py:4 rank '1'"]
    assert lines.count("end") == 2
    said = [line for line in lines if "debugpy runs saferun and follows" in line]
    assert len(said) == (0 if disable else 1), out


@pytest.mark.parametrize(
    ("name", "disable"), [("torchrun", ""), ("saferun", ""), ("saferun", "1")], ids=str
)
def test_viztracer_has_the_traces_of_the_ranks(place, name, disable):
    write(place / "rank.py", "def of_the_rank(): pass\nof_the_rank()\n")
    options = ["--quiet", "-o", "trace.json", "--include_files", str(place / "rank.py"), "--"]
    program = [TORCH / name, "--nproc-per-node=2", str(place / "rank.py")]
    environ = {"SAFERUN_DISABLE": disable}
    beside_torch(place, "-m", "viztracer", *options, *program, **environ)
    events = json.loads(text_of(place / "trace.json"))["traceEvents"]
    seen = {one["pid"] for one in events if "of_the_rank" in one["name"]}
    assert len(seen) == 2


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_hooks_run_in_ranks_that_opentelemetry_instruments(place, inside):
    otel = "opentelemetry.instrumentation.auto_instrumentation"
    write(
        place / "rank.py",
        "import os, sys\n"
        f"seen = '_saferun.inject' in sys.modules, {otel!r} in sys.modules\n"
        "os.write(1, f'{seen}\\n'.encode())\n",
    )
    instrument = ["-c", f"from {otel} import run; run()"]
    run = ["--set=hooks.required=true", "--nproc-per-node=2"]
    if inside:
        start = ["-m", "saferun", *run, "--no-python", sys.executable, *instrument, sys.executable]
    else:
        start = [*instrument, TORCH / "saferun", *run]
    none = {f"OTEL_{name}_EXPORTER": "none" for name in ("TRACES", "METRICS", "LOGS")}
    out = beside_torch(place, *start, "rank.py", **none)
    assert out.splitlines() == ["(True, True)"] * 2


def test_submitit_runs_the_command_and_the_function(place):
    out = ran(place, APART / "python", PROGRAMS / "ecosystem" / "submitit_jobs.py", place)
    assert out.splitlines()[-3:] == ["command: the job's line", "function: 0 ok 1", "log: 1"]


@pytest.mark.slow  # make test-ray
def test_ray_tells_the_driver_how_a_job_ends_and_cancelling_a_task_ends_its_job(place):
    mark = uuid.uuid4().hex
    program = PROGRAMS / "ecosystem" / "ray_tasks.py"
    # Ray's workers would have nice 15, and hand what they count to its makers.
    environ = {MARK: mark, "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    out = ran(place, WITH_RAY / "python", program, place, **environ)
    assert out.splitlines() == [
        *[f"{sys.executable} 2"] * 2,
        "returned 0 ok",
        "raised 1 ValueError: devices 0,1",
        "cancelled by interrupt: down 2, alive 0",
        "cancelled by force: down 0, alive 0",
    ]
    until(lambda: not living(mark), "processes are left")


def test_pipx_installs_it_without_torch_beside_an_environment_that_has_it(place):
    homes = {"PIPX_HOME": f"{place}/pipx", "PIPX_BIN_DIR": f"{place}/bin"}
    ran(place, APART / "pipx", "install", ROOT, **homes)
    assert not list(place.glob("pipx/venvs/saferun/lib/*/site-packages/torch"))
    out = ran(place, "saferun", "--nproc-per-node=2", "rank.py", path=str(place / "bin"))
    assert out.splitlines() == [f"{sys.executable} 2"] * 2


def test_uv_runs_it_in_a_project(place):
    write(
        place / "pyproject.toml",
        '[project]\nname = "p"\nversion = "0"\nrequires-python = ">=3.10"\n'
        'dependencies = ["saferun"]\n'
        f"[tool.uv.sources]\nsaferun = {{path = {json.dumps(str(ROOT))}}}\n",
    )
    out = ran(place, APART / "uv", "run", "--quiet", "saferun", "--nproc-per-node=2", "rank.py")
    assert out.splitlines() == [f"{sys.executable} 2"] * 2


CONFIG = """
repos:
  - repo: {root}
    rev: {commit}
    hooks:
      - id: saferun-profiles-check
      - {{id: saferun-gen-shell-check, files: "run[.]sh$"}}
"""


def test_pre_commit_runs_the_committed_hooks_without_torch(place):
    write(place / "profiles" / "good.yaml", "schema: 1\nextends: [cuda]\n")
    ran(place, TORCH / "saferun", "gen-shell", "-o", "run.sh", "--", "rank.py")
    commit = ran(ROOT, "git", "rev-parse", "HEAD").strip()
    write(place / ".pre-commit-config.yaml", CONFIG.format(root=ROOT, commit=commit))
    ran(place, "git", "init", "--quiet")
    ran(place, "git", "add", ".pre-commit-config.yaml", "profiles", "run.sh")
    homes = {"PRE_COMMIT_HOME": f"{place}/hooks"}
    out = ran(place, TORCH / "pre-commit", "run", "--all-files", "--verbose", **homes)
    assert "profiles/good.yaml: no errors" in out
    assert "run.sh: up to date" in out
    assert not list(place.glob("hooks/**/site-packages/torch"))


def test_the_action_installs_it_and_checks(place):
    import yaml

    steps = yaml.safe_load(text_of(ROOT / "action.yml"))["runs"]["steps"]
    write(place / "profiles" / "good.yaml", "schema: 1\n")
    inputs = {"INPUT_PYTHON": "python3", "INPUT_PROFILES": "profiles/*.yaml", "INPUT_SCRIPTS": ""}
    runner = {"RUNNER_TEMP": f"{place}/runner", "GITHUB_ACTION_PATH": str(ROOT)}
    for step in steps:
        write(place / "step", step["run"])
        shell = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "step")
        out = ran(place, *shell, **inputs, **runner)
    assert out == "profiles/good.yaml: no errors\n"
