"""The injected bootstrap: inert, light and honest, in real interpreters."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases import check_cases
from interpreters import NEUTRAL, SITE, both, fake_torch, other_pythons
from repo import source
from sandbox import executable, shell, text_of, write
from users import open_place

from saferun.inject import bootstrap

ARMED = """
import sys, _frozen_importlib
print("armed" if "saferun" in _frozen_importlib._find_spec.__module__ else "not armed")
"""


def test_without_a_contract_nothing_is_armed(interpreters):
    ran = interpreters.run(ARMED + "print([m for m in sys.modules if 'saferun' in m])")
    assert ran.out.split("\n")[:2] == ["not armed", "[]"]


@pytest.mark.parametrize("python", other_pythons(), ids=lambda p: p.parts[-3])
def test_every_python_from_3_9_on_is_armed_without_saferun(interpreters, python):
    fake = fake_torch(interpreters.folder)
    ran = interpreters.run(
        ARMED + "import torch; print(torch.__spec__.loader is torch.__loader__)",
        hooks={"compile": {"enabled": "off"}},
        python=str(python),
        PYTHONPATH=both(SITE, fake),
    )
    assert (ran.code, ran.out.split(), ran.err) == (0, ["armed", "True"], "")


def test_the_site_directory_twice_on_the_path_arms_once(interpreters):
    ran = interpreters.run(
        "import _frozen_importlib as i; first = i._find_spec\n"
        "print(sum(c.cell_contents.__name__ == '_find_spec' for c in first.__closure__ "
        "if callable(c.cell_contents) and 'saferun' in c.cell_contents.__module__))",
        hooks=NEUTRAL,
        PYTHONPATH=both(SITE, SITE, f"{SITE}/"),
    )
    assert ran.out == "0\n"  # ours wraps importlib's own, not ours once more


SHOW = """
import os, sys
print(len(os.listdir("/proc/self/task")), sys.path, *map(type, sys.meta_path), type(sys.meta_path))
print(*sorted(sys.modules))
"""


def test_arming_changes_nothing_that_a_script_sees(interpreters):
    """Threads, paths, finders; of modules there are ours, and one that is built in."""
    bare = interpreters.run(SHOW, PYTHONPATH="relative").out.splitlines()
    with open_place() as place:  # a path in ASCII is read without json
        interpreters.receipts = Path(place, "receipts")
        armed = interpreters.run(SHOW, hooks=NEUTRAL, PYTHONPATH=both(SITE, "relative"))
    seen, modules = armed.out.splitlines()
    assert seen == bare[0]
    more = set(modules.split()) - set(bare[1].split())
    assert {m for m in more if not m.startswith("_saferun")} <= {"faulthandler"}


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_a_python_that_ignores_its_environment_leaves_no_receipt(interpreters, flag):
    ran = interpreters.run(ARMED, hooks=NEUTRAL, flags=(flag,), RANK="0")
    assert (ran.out, ran.receipts) == ("not armed\n", [])


def test_spawned_children_are_armed(interpreters):
    assert interpreters.run(source("inject/spawned_child"), hooks=NEUTRAL).out == "True\n"


COMMAND_LINES = [
    (["python", "train.py", "-m", "torch.distributed.run"], "job"),
    (["python", "-u", "-W", "ignore", "train.py"], "job"),
    (["python", "-m", "train"], "job"),
    (["python"], "job"),
    (["python", "-"], "job"),
    (["python", "/v/bin/torchrun", "train.py"], "agent"),
    (["python", "-um", "torch.distributed.run", "x.py"], "agent"),
    (["python", "-Xfaulthandler", "-mtorch.distributed.launch", "x.py"], "agent"),
    (["python", "/s/torch/distributed/run.py", "x.py"], "agent"),
    (["python", "/home/u/mytorchrun", "x.py"], "job"),
    (["python", "-c", "from multiprocessing.resource_tracker import main;main(5)"], "helper"),
    (["python", "-c", "from multiprocessing.forkserver import main; main(4)"], "helper"),
    (["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()"], "job"),
    (["python", "/s/torch/_inductor/compile_worker/__main__.py", "--workers=2"], "helper"),
    (["python", "-m", "torch._inductor.compile_worker", "--workers=2"], "helper"),
]


def test_a_command_line_tells_jobs_from_agents_and_helpers():
    def check(argv: list[str], kind: str) -> None:
        assert bootstrap.kind_of(argv) == kind

    check_cases(COMMAND_LINES, check)


def test_the_first_python_of_a_rank_is_marked_and_its_helpers_are_not(interpreters):
    child = "import os; print(os.environ['SAFERUN_RANK_PID'] == str(os.getpid()))"
    script = (
        f"{child}\nimport subprocess, sys; sys.stdout.flush()\n"
        f"subprocess.call([sys.executable, '-c', {child!r}])"
    )
    assert interpreters.run(script, hooks=NEUTRAL, RANK="1").out == "True\nFalse\n"


def test_an_agent_forgets_the_rank_mark_that_it_inherited(interpreters):
    agent = interpreters.folder / "torchrun"
    write(agent, ARMED + "import os; print(os.environ.get('SAFERUN_RANK_PID'))")
    ran = interpreters.run(hooks=NEUTRAL, argv=(str(agent),), RANK="0", SAFERUN_RANK_PID="1")
    assert ran.out == "not armed\nNone\n"


# honesty


def test_an_unreadable_contract_is_one_line_and_the_job_runs(interpreters):
    fake = fake_torch(interpreters.folder)
    environ = interpreters.environ(None, SAFERUN_INJECT="{broken", PYTHONPATH=both(SITE, fake))
    ran = interpreters.run("import torch; print('ran')", environ=environ)
    assert (ran.code, ran.out) == (0, "ran\n")
    assert ran.err.startswith("saferun: inject: SAFERUN_INJECT: ")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("required", [False, True])
def test_a_hook_that_cannot_be_applied_ends_the_job_only_where_required(interpreters, required):
    fake = fake_torch(interpreters.folder, "del compile\n")
    ran = interpreters.run(
        "print('first', end='')\n"
        "try:\n    import torch\nexcept BaseException: pass\n"
        "print(' second')",
        hooks={"compile": {"enabled": "off"}, "required": required},
        PYTHONPATH=both(SITE, fake),
        RANK="0",
    )
    assert (ran.code, ran.out) == ((70, "first") if required else (0, "first second\n"))
    assert ran.err.startswith("saferun: inject: hook compile: AttributeError: ")
    assert ran.err.count("\n") == 1
    if required:
        assert [line["error"][:14] for line in ran.by("compile", "failed")] == ["AttributeError"]


def test_a_script_may_clear_its_environment_before_it_imports_torch(interpreters):
    fake = fake_torch(interpreters.folder)
    ran = interpreters.run(
        "import os; os.environ.clear(); import torch; print(torch.compile is len)",
        hooks={"compile": {"enabled": "off"}},
        PYTHONPATH=both(SITE, fake),
    )
    assert (ran.out, ran.err) == ("False\n", "")


def test_a_python_that_a_shell_runs_on_the_way_is_not_the_rank(interpreters, torchrun, tmp_path):
    """Under --no-python the shell is the rank, until it execs."""
    reported = tmp_path / "reported"
    mark = "import os; print(os.environ.get('SAFERUN_RANK_PID') == str(os.getpid()))"
    write(tmp_path / "mark.py", mark)
    words = shell(sys.executable, tmp_path / "mark.py")
    to = shell(reported)
    text = f"#!/bin/bash\n{words} >{to}.1\nexec {words} >{to}.2\n"
    program = executable(tmp_path / "rank.sh", text)
    environ = interpreters.environ(NEUTRAL)
    arguments = [*torchrun, "--standalone", "--no-python", str(program)]
    subprocess.run(arguments, env=environ, check=True, capture_output=True, timeout=500)
    assert [text_of(Path(f"{reported}.{n}")) for n in (1, 2)] == ["False\n", "True\n"]


def test_an_older_python_is_left_alone(interpreters, tmp_path):
    old = sorted(Path("~/.pyenv/versions").expanduser().glob("2.7*/bin/python"))
    if not old:
        pytest.skip("no Python 2.7 on this machine")
    quiet = {"PYTHONDONTWRITEBYTECODE": "1"}  # 2.7 would write beside our source
    ran = interpreters.run("print('fine')", hooks=NEUTRAL, python=str(old[0]), **quiet)
    assert (ran.code, ran.out, ran.err) == (0, "fine\n", "")


def test_an_agent_does_not_look_for_garbage_when_it_ends(interpreters):
    """Its status and what it registered for its end stay as they are."""
    folder = interpreters.folder / "torch" / "distributed"
    folder.mkdir(parents=True)
    for place in (folder, folder.parent):
        write(place / "__init__.py", "")
    write(folder / "run.py", source("inject/agent_with_a_cycle"))
    ran = interpreters.run(argv=("-m", "torch.distributed.run"), hooks={})
    assert (ran.code, ran.out) == (3, "registered, frozen 0\n")


@pytest.mark.parametrize(("then", "status"), [("print('done')", 0), ("raise KeyError('x')", 1)])
def test_hooks_that_vanish_while_a_rank_runs_cost_lines_and_nothing_else(
    interpreters, then, status
):
    hooks, fake = interpreters.folder / "inject", fake_torch(interpreters.folder)
    shutil.copytree(Path(SITE).parent, hooks)
    script = f"import shutil; shutil.rmtree({str(hooks)!r}); import torch; " + then
    path = both(hooks / "site", fake)
    ran = interpreters.run(script, hooks=NEUTRAL, PYTHONPATH=path, RANK="0")
    assert ran.code == status
    assert ran.out == ("done\n" if status == 0 else "")
    assert ran.messages()
    assert all(line.startswith("saferun: inject: ") for line in ran.messages()), ran.err
    assert ran.err.count("Traceback") == status
    assert ("KeyError: 'x'" in ran.err) == bool(status)
