"""What people put around a run and inside it: other sitecustomize files, debuggers, tracers."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from cases import slow
from repo import ROOT
from rights import needs
from runs import AT_ONCE, Run, program, ran, run
from sandbox import executable, shell_program, write

RANK = program("surroundings_rank")
TORCHRUN = Path(sys.executable).with_name("torchrun")
# As OpenTelemetry's: it puts itself first for every process that follows, and chains to nobody.
FIRST = """
import os, sys
sys.other_was_here = True
here = os.path.dirname(os.path.abspath(__file__))
path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry != here]
os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, path)])
"""
# It imports the next one, as ddtrace's does.
CHAINED = """
import os, sys
sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
del sys.modules["sitecustomize"]
import sitecustomize
"""
COMPILE_OFF = "--set=hooks.compile.enabled=off"
REQUIRED = "--set=hooks.required=true"


def another(folder: Path, text: str = FIRST, name: str = "sitecustomize") -> str:
    """Make another sitecustomize below a folder; return its directory."""
    place = folder / "another one"
    place.mkdir()
    (place / f"{name}.py").write_text(text, encoding="utf-8")
    return str(place)


def inherited(place: str) -> str:
    return os.pathsep.join(filter(None, (place, os.environ.get("PYTHONPATH"))))


def ranks(job: Run) -> list[str]:
    """Return the lines of the ranks."""
    return sorted(line for line in job.out.splitlines() if line.startswith("hooks="))


@pytest.mark.parametrize("retries", ["0", "2"])
def test_hooks_run_in_ranks_though_another_sitecustomize_puts_itself_first(tmp_path, retries):
    place = another(tmp_path)
    argv = [f"--retries={retries}", REQUIRED, COMPILE_OFF, "--nproc-per-node=2", RANK]
    job = ran(tmp_path, *argv, env={"PYTHONPATH": inherited(place)})
    attempt = None if retries == "0" else "1"
    assert ranks(job) == [f"hooks=True other=True followed=False attempt={attempt}"] * 2


def test_hooks_run_in_a_program_that_a_rank_executes_behind_another_sitecustomize(tmp_path):
    place = another(tmp_path, "import sys; sys.other_was_here = True")
    wrapper = tmp_path / "instrument.py"
    wrapper.write_text(
        "import os, sys\n"
        f"os.environ['PYTHONPATH'] = {place!r} + os.pathsep + os.environ['PYTHONPATH']\n"
        "os.execl(sys.executable, sys.executable, *sys.argv[1:])\n",
        encoding="utf-8",
    )
    argv = [REQUIRED, COMPILE_OFF, "--no-python", sys.executable, str(wrapper), RANK]
    job = ran(tmp_path, *argv)
    assert ranks(job) == ["hooks=True other=True followed=False attempt=1"]


@pytest.mark.parametrize("required", [False, True], ids=["said", "required"])
def test_a_rank_behind_another_sitecustomize_is_named_before_it_meets_others(tmp_path, required):
    place = another(tmp_path)
    line = (
        f"test $RANK = 0 || sleep 1; PYTHONPATH={shlex.quote(place)}:$PYTHONPATH "
        f'{shlex.quote(sys.executable)} "$@"; exit $?'
    )
    argv = [*([REQUIRED] if required else []), AT_ONCE, COMPILE_OFF, "--nproc-per-node=2"]
    argv += ["--no-python", "bash", "-c", line, "-", RANK, "meet"]
    job = ran(tmp_path, *argv, status=None if required else 0)
    said = [text for text in job.messages() if "does not run in rank" in text]
    assert len(said) == 1
    where = "ranks?" if required else "ranks 0-1"  # it ends with the first that is seen
    named = re.search(rf"{where}[ 01-]*: (.{{50}})", said[0])  # a long line is cut
    assert named
    assert f"{place}/sitecustomize.py is loaded in".startswith(named[1])
    if required:
        assert "met" not in job.out
        (ended,) = job.events("ended")
        assert ended["kind"] == "hooks-missing"
        assert f"{place}/sitecustomize.py is loaded in its place" in ended["root_line"]
    else:
        assert job.out.count("met") == 2


WRAPPER = program("python_wrapper")


@pytest.mark.parametrize("how", ["job", "fixed", "isolated"])
@pytest.mark.parametrize("no_python", [True, False], ids=["no-python", "entrypoint"])
def test_a_training_without_hooks_below_a_python_that_has_them_is_named(tmp_path, how, no_python):
    place = another(tmp_path)
    argv = [REQUIRED, AT_ONCE, COMPILE_OFF, "--nproc-per-node=2"]
    argv += ["--no-python", sys.executable] if no_python else []
    argv += [WRAPPER, place, how, RANK, *(["meet"] if how != "fixed" else [])]
    job = ran(tmp_path, *argv, status=None)
    assert "met" not in job.out
    (ended,) = job.events("ended")
    assert ended["kind"] == "hooks-missing"
    other = f"{place}/sitecustomize.py is loaded in its place"
    why = "started with -I, -E or -S" if how == "isolated" else other
    assert why in ended["root_line"]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_with_hooks_do_not_wait_for_one_without(tmp_path, rank):
    place = another(tmp_path)
    job = ran(tmp_path, COMPILE_OFF, "--nproc-per-node=2", WRAPPER, place, rank, RANK, "meet")
    assert (ranks(job)[0].split()[0], job.out.count("met")) == ("hooks=False", 2)
    assert job.err.count(f"in rank {rank}: {place}/sitecustomize.py is loaded in its place") == 1


@pytest.mark.parametrize("how", ["job", "helper"])
def test_a_wrapper_whose_training_has_hooks_is_left_alone(tmp_path, how):
    place = another(tmp_path, CHAINED if how == "job" else FIRST)
    argv = [REQUIRED, COMPILE_OFF, "--nproc-per-node=2", WRAPPER, place, how, RANK, "meet"]
    job = ran(tmp_path, *argv)
    assert job.out.count("met") == 2
    assert len(job.messages()) <= 1


@pytest.mark.parametrize("required", [False, True], ids=["said", "required"])
@pytest.mark.parametrize("ranks", ["spawn", "warm"])
def test_a_plain_python_behind_another_sitecustomize_is_named(tmp_path, required, ranks):
    place = another(tmp_path)
    # As an environment manager's shim, which is first in PATH.
    before = f"export PYTHONPATH={shlex.quote(place)}:$PYTHONPATH"
    shim = executable(tmp_path / "shims" / "python", shell_program(sys.executable, before=before))
    shutil.copy(shim, shim.with_name("python3"))
    script = tmp_path / "plain.py"
    script.write_text("import sys, torch\nprint(sys.other_was_here)\n", encoding="utf-8")
    argv = ["--set=launcher=python", f"--set=start.ranks={ranks}", COMPILE_OFF, AT_ONCE]
    argv += [REQUIRED] if required else []
    path = f"{shim.parent}:{os.path.dirname(sys.executable)}:/usr/bin:/bin"
    job = ran(tmp_path, *argv, str(script), env={"PATH": path}, status=None if required else 0)
    line = "saferun's sitecustomize does not run in the job's Python: "
    if required:
        (ended,) = job.events("ended")
        assert ended["kind"] == "hooks-missing"
        assert ended["root_line"] == f"{line}{place}/sitecustomize.py is loaded in its place"
    else:
        assert job.out == "True\n"
        assert len([text for text in job.messages() if line in text]) == 1


FOLLOWING = [("fork_exec", []), ("executable", []), ("popen", ["--retries=0"])]
FOLLOWING += slow(("popen", []), ("fork_exec", ["--retries=0"]), ("executable", ["--retries=0"]))


@pytest.mark.parametrize(("tool", "argv"), FOLLOWING)
def test_a_tool_that_follows_processes_reaches_the_ranks(tmp_path, tool, argv):
    command = [sys.executable, program("follower"), tool, str(TORCHRUN.with_name("saferun"))]
    job = ran(tmp_path, *argv, "--nproc-per-node=2", RANK, command=command)
    assert ranks(job) == ["hooks=True other=False followed=True attempt=None"] * 2
    assert job.out.endswith("the tool sees the end\n")
    said = [line for line in job.messages() if "not supervised" in line]
    assert len(said) == (0 if argv else 1)


@pytest.mark.parametrize("tool", ["fork_exec", "executable", *slow("popen", "none")])
def test_a_disabled_saferun_is_equal_to_torchrun_under_a_tool(tmp_path, tool):
    ways = []
    for name, environ in (("torchrun", {}), ("saferun", {"SAFERUN_DISABLE": "1"})):
        command = [sys.executable, program("follower"), tool, str(TORCHRUN.with_name(name))]
        with run(tmp_path, RANK, "fail", command=command, env=environ) as job:
            status = job.end()
        ways.append((status, job.out, job.messages(), "ChildFailedError" in job.err))
    assert ways[0] == ways[1]
    assert ways[0][0] == 1
    assert ways[0][1].endswith("the tool sees the end\n")


def test_under_a_tool_that_follows_nobody_the_run_is_supervised(tmp_path):
    command = [sys.executable, program("follower"), "none", str(TORCHRUN.with_name("saferun"))]
    job = ran(tmp_path, RANK, command=command)
    assert ranks(job) == ["hooks=True other=False followed=False attempt=1"]


WITHOUT_PROC = ["unshare", "--mount", "sh", "-c", 'umount -l /proc && exec "$@"', "-"]
NEEDS_MOUNTS = needs("make namespaces")


@NEEDS_MOUNTS
def test_without_proc_torchrun_runs_unsupervised_and_a_line_says_so(tmp_path):
    command = [*WITHOUT_PROC, sys.executable, "-m", "saferun"]
    job = ran(tmp_path, RANK, command=command)
    assert ranks(job) == ["hooks=True other=False followed=False attempt=None"]
    assert [line for line in job.messages() if "there is no /proc" in line] == job.messages()[:1]
    assert "keeper" not in job.err


@NEEDS_MOUNTS
@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["--set=watch.mode=end"], "watch.mode: end"),
        (["--set=launcher=python", "--set=workers=2"], "workers: 2"),
    ],
    ids=["watch", "workers"],
)
def test_without_proc_a_key_that_needs_supervision_is_refused(tmp_path, argv, key):
    command = [*WITHOUT_PROC, sys.executable, "-m", "saferun"]
    job = ran(tmp_path, *argv, RANK, command=command, status=69)
    assert "there is no /proc" in job.messages()[0]
    assert key in job.messages()[0]
    assert job.out == ""


def test_a_keeper_that_fails_before_the_start_is_our_own_fault(tmp_path):
    for name in ("src/saferun", "profiles"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.pyc"))
    keeper = tmp_path / "src" / "saferun" / "keeper" / "keeper_main.py"
    text = keeper.read_text(encoding="utf-8").replace(
        "    wake, notify = _set_up()\n", "    raise ValueError('planted')\n"
    )
    assert "planted" in text
    keeper.write_text(text, encoding="utf-8")
    argv = ["--set=launcher=python", AT_ONCE, RANK]
    job = ran(tmp_path, *argv, env={"PYTHONPATH": inherited(str(tmp_path / "src"))}, status=70)
    assert "ValueError: planted" in job.err
    assert "keeper failed before the job's start" in job.messages()[-1]
    assert "killed" not in job.err
    assert job.out == ""


SPAWNED = """
import os, sys
pid = os.posix_spawn(sys.executable, [sys.executable, *sys.argv[1:]], os.environ)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("parent", [[], ["-c", SPAWNED]], ids=["forked", "spawned"])
@pytest.mark.parametrize("ranks", ["spawn", "warm"])
def test_a_job_ignores_the_signals_that_it_would_ignore_without_us(tmp_path, parent, ranks):
    script = tmp_path / "ignored.py"
    write(
        script, "print(*(line for line in open('/proc/self/status') if line.startswith('SigIgn')))"
    )
    argv = ["--set=launcher=python", f"--set=start.ranks={ranks}", str(script)]
    job = ran(tmp_path, *argv, command=[sys.executable, *parent, "-m", "saferun"])
    # Started as the job was: a Python from 3.13 on starts some by posix_spawn, others by fork.
    assert job.out == job.ran(sys.executable, *parent, script).stdout
