"""Jobs under `launcher: python`, in real runs: each behaves as `python ARGUMENTS` does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cases import slow
from helpers import until
from runs import PYTHON, ran, run
from sandbox import executable, frame, shell_program, write

SHOW = "import os, sys; print(sys.argv, sys.stdin.read(), os.environ['SAFERUN_ATTEMPT'])"


def test_code_module_and_script_get_arguments_and_stdin(tmp_path):
    (tmp_path / "show.py").write_text(SHOW, encoding="utf-8")
    for argv in (["-c", SHOW], ["-m", "show"], ["show.py"]):
        with run(tmp_path, *PYTHON, *argv, "a", "--set", "b", stdin=subprocess.PIPE) as job:
            job.process.stdin.write(b"from stdin")
            assert job.end() == 0, job.err
        name = {"-c": "-c", "-m": f"{tmp_path}/show.py"}.get(argv[0], "show.py")
        assert job.out == f"{[name, 'a', '--set', 'b']} from stdin 1\n"


def test_a_script_on_stdin_runs_once(tmp_path):
    with run(tmp_path, *PYTHON, "-", "a", stdin=subprocess.PIPE) as job:
        job.process.stdin.write(b"import sys; print(sys.argv); sys.exit(3)")
        assert job.end() == 3
    assert job.out == "['-', 'a']\n"


def test_the_python_is_the_users_which_may_lack_saferun(tmp_path):
    place = tmp_path / "other" / "bin"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(place.parent)], check=True, timeout=300
    )
    code = "import sys, importlib.util as u; print(sys.prefix, u.find_spec('saferun'))"
    path = {"PATH": f"{place}:/usr/bin:/bin", "PYTHONPATH": ""}
    ours = {"command": ["/usr/bin/env", "-u", "PYTHONPATH", sys.executable, "-m", "saferun"]}
    job = ran(tmp_path, *PYTHON, "-c", code, env=path, **ours)
    assert job.out == f"{place.parent} None\n"


def test_a_killed_script_is_tried_again_and_a_mistake_is_not(tmp_path):
    code = "import os; os.environ['SAFERUN_ATTEMPT'] == '1' and os.kill(os.getpid(), 9); print(7)"
    job = ran(tmp_path, *PYTHON, "-c", code)
    assert job.out == "7\n"
    (tmp_path / "again").mkdir()
    job = ran(tmp_path / "again", *PYTHON, "-c", "1 / 0", status=1)
    assert [event["kind"] for event in job.events("ended")] == ["user-exception"]


def test_a_script_may_start_saferun_itself_as_a_notebook_does(tmp_path):
    """`%run file.py` and `!saferun`: saferun is a child of a Python that has threads of its own."""
    (tmp_path / "cell.py").write_text(
        "import os, subprocess, sys, threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        f"ran = subprocess.run([sys.executable, '-m', 'saferun', *{PYTHON}, '-c', 'print(5)'])\n"
        "sys.exit(ran.returncode)\n",
        encoding="utf-8",
    )
    job = ran(tmp_path, str(tmp_path / "cell.py"), command=[sys.executable])
    assert job.out == "5\n"


def test_a_wrapper_named_python_is_what_the_shell_would_start(tmp_path):
    place = tmp_path / "bin"
    executable(place / "python", shell_program(sys.executable, before="echo wrapped"))
    job = ran(tmp_path, *PYTHON, "-c", "print(1)", env={"PATH": f"{place}:/usr/bin:/bin"})
    assert job.out == "wrapped\n1\n"


def test_an_interrupt_sent_to_saferun_alone_reaches_the_script_once(tmp_path):
    code = (
        "import sys, time\n"
        "try:\n    print('ready', flush=True)\n    while True: time.sleep(0.1)\n"
        "except KeyboardInterrupt:\n"
        "    print('asked', flush=True); sys.stdin.read(); print('cleaned up')\n"
    )
    with run(tmp_path, *PYTHON, "-c", code, stdin=subprocess.PIPE) as job:
        assert job.process.stdout.readline() == b"ready\n"
        os.kill(job.process.pid, signal.SIGINT)
        assert job.process.stdout.readline() == b"asked\n"
        assert job.end() == 0, job.err
        assert job.out == "cleaned up\n"
        until(lambda: job.events("ended"), "the journal")
        assert job.events("ended")[0]["signals"] == ["SIGINT"]
        assert Path(job.journal, "plan.json").exists()


@pytest.mark.parametrize(
    ("key", "stays"),
    [
        ("retry.attempts=1", False),
        ("watch.mode=warn", False),
        ("hooks.optuna.mode=on", True),
        ("recover.gpu_reset=when-idle", True),
        *slow(("watch.silence_s=20", True)),  # runs of one attempt elsewhere show what others do
    ],
)
def test_a_key_that_needs_saferun_beside_a_single_attempt_keeps_it_there(tmp_path, key, stays):
    """The plan says so, and it is so."""
    code = "import sys; print(1, flush=True); sys.stdin.read()"
    argv = [*PYTHON, "--retries=0", f"--set={key}", "-c", code]
    plan = ran(tmp_path, "plan", *argv)
    assert ("saferun stays beside the job for" in plan.out) is stays
    assert ("the job replaces saferun" in plan.out) is not stays
    with run(tmp_path, *argv, stdin=subprocess.PIPE) as job:
        job.process.stdout.readline()
        words = Path(f"/proc/{job.process.pid}/cmdline").read_bytes().split(b"\0")
        assert (b"saferun" in words) is stays
        assert job.end() == 0, job.err


@pytest.mark.parametrize(
    ("torch", "rank"),
    [("", {}), ("torch, ", {"RANK": "0"}), *slow(("", {"RANK": "0"}), ("torch, ", {}))],
)
def test_a_crash_in_native_code_has_its_python_stack_and_the_torch_version(tmp_path, torch, rank):
    code = f"import {torch}ctypes\ndef step():\n    ctypes.string_at(0)\nstep()\n"
    write(tmp_path / "crash.py", code)
    job = ran(tmp_path, *PYTHON, "--retries=1", "crash.py", env=rank, status=139)
    for event in job.events("ended"):
        assert frame(tmp_path / "crash.py", "line 3 in step") in event["stack"]
    (versions,) = {tuple(event["versions"]) for event in job.events("attempt")}
    assert any(version.startswith("torch ") for version in versions)


def test_the_stack_of_a_rank_that_multiprocessing_started_is_written(tmp_path):
    (tmp_path / "spawn.py").write_text(
        "import ctypes, torch, torch.multiprocessing as mp\n"
        "def main(rank):\n"
        "    ctypes.string_at(0)\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(main, nprocs=1)\n",
        encoding="utf-8",
    )
    job = ran(tmp_path, *PYTHON, "--set=retry.attempts=1", "spawn.py", status=1)
    assert frame(tmp_path / "spawn.py", "line 3 in main") in job.err
