"""Jobs under `launcher: python`, in real runs: each behaves as `python ARGUMENTS` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers import until
from runs import executable, run

PYTHON = ["--profile=cpu", "--set=launcher=python", "--set=retry.backoff_s=[0, 0]"]
SHOW = "import os, sys; print(sys.argv, sys.stdin.read(), os.environ['SAFERUN_ATTEMPT'])"


def test_code_module_and_script_get_arguments_and_stdin(tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
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
    with run(tmp_path, *PYTHON, "-c", code, env=path, **ours) as job:
        assert job.end() == 0, job.err
    assert job.out == f"{place.parent} None\n"


def test_a_killed_script_is_tried_again_and_a_mistake_is_not(tmp_path):
    code = "import os; os.environ['SAFERUN_ATTEMPT'] == '1' and os.kill(os.getpid(), 9); print(7)"
    with run(tmp_path, *PYTHON, "-c", code) as job:
        assert job.end() == 0, job.err
        assert job.out == "7\n"
    (tmp_path / "again").mkdir()
    with run(tmp_path / "again", *PYTHON, "-c", "1 / 0") as job:
        assert job.end() == 1
        assert [event["kind"] for event in job.events("ended")] == ["user-exception"]


def test_a_script_may_start_saferun_itself_as_a_notebook_does(tmp_path):
    """`%run file.py` and `!saferun`: saferun is a child of a Python that has threads of its own."""
    (tmp_path / "cell.py").write_text(
        "import os, subprocess, sys, threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        f"ran = subprocess.run([sys.executable, '-m', 'saferun', *{PYTHON}, '-c', 'print(5)'])\n"
        "sys.exit(ran.returncode)\n"
    )
    with run(tmp_path, str(tmp_path / "cell.py"), command=[sys.executable]) as job:
        assert job.end() == 0, job.err
        assert job.out == "5\n"
        job.nothing_lives()


def test_a_wrapper_named_python_is_what_the_shell_would_start(tmp_path):
    place = tmp_path / "bin"
    place.mkdir()
    executable(place / "python", f'#!/bin/sh\necho wrapped\nexec {sys.executable} "$@"\n')
    with run(tmp_path, *PYTHON, "-c", "print(1)", env={"PATH": f"{place}:/usr/bin:/bin"}) as job:
        assert job.end() == 0, job.err
    assert job.out == "wrapped\n1\n"


def test_an_interrupt_sent_to_saferun_alone_reaches_the_script_once(tmp_path):
    code = (
        "import time\n"
        "try:\n    print('ready', flush=True); time.sleep(600)\n"
        "except KeyboardInterrupt:\n    time.sleep(0.3); print('cleaned up')\n"
    )
    with run(tmp_path, *PYTHON, "-c", code) as job:
        assert job.process.stdout.readline() == b"ready\n"
        os.kill(job.process.pid, 2)
        assert job.end() == 0, job.err
        assert job.out == "cleaned up\n"
        until(lambda: job.events("ended"), "the journal")
        assert job.events("ended")[0]["signals"] == ["SIGINT"]
        assert Path(job.journal, "plan.json").exists()
