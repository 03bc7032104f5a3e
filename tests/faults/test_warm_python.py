"""A process of plain python that replaces another one: warm, beside one that is started."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from cases import slow
from helpers import children, until
from sandbox import SAFERUN, output, text_of
from warm_jobs import DIES, WAYS, Python, at_terminal, plain


@pytest.fixture
def job(tmp_path: Path) -> Any:
    with Python(tmp_path) as one:
        yield one


def test_the_process_that_replaces_another_one_has_imported_ahead(job):
    job.package("heavy", "import os\nopen(os.environ['LOG'], 'a').write(f'{os.getpid()}\\n')\n")
    job.write("import heavy\n" + DIES + "print(os.getpid(), 'ä', sys.argv[1:])\n")
    log = job.folder / "log"
    job.learn("job.py", LOG=str(log))
    log.unlink()
    done = job.run("warm", "job.py", "--x", LOG=str(log))
    assert (done.returncode, job.said in done.stderr) == (0, False), done.stderr
    first, second = text_of(log).split()
    assert done.stdout == f"{second} ä ['--x']\n"
    assert first != second
    assert [start.split()[0] for start in job.starts()] == ["ahead"]
    shown = output(*SAFERUN, "runs", "show", job.last().name, env=job.environ)
    assert re.search(r"ranks +warm: \d+ modules imported ahead, in [\d.]+ s", shown)


def test_a_variable_that_an_import_assigns_is_no_reason(job):
    job.package("sets", "import os\nos.environ.setdefault('OF_SETS', '1')\n")
    job.write(f"import sets\n{DIES}print(os.environ['OF_SETS'])\n")
    job.learn()
    done = job.run("warm")
    assert (done.stdout, job.said in done.stderr) == ("1\n", False)
    assert job.starts()[0].startswith("ahead ")


@pytest.mark.parametrize("victim", ["saferun", *slow("keeper")])
def test_a_kill_leaves_no_process_that_waits(job, victim):
    job.write(
        "if 'LEARN' not in os.environ:\n    while not successor.waits(): pass\n"
        "    print('waits', flush=True)\n    signal.pause()\n"
    )
    job.learn()
    with job.popen(*job.command("warm"), env={"WAY": "warm"}) as run:
        assert run.stdout.readline() == b"waits\n"
        names = job.living()
        (warm,) = [pid for pid, name in names.items() if name == "saferun-warm"]
        keeper = next(pid for pid in names if warm in children(pid))
        os.kill(run.pid if victim == "saferun" else keeper, signal.SIGKILL)
        until(lambda: warm not in job.living(), "the warm process lives")
        if victim == "keeper":
            run.terminate()
        job.nothing_lives()


PRESS = """
import time
try:
    open("press", "w").close()
    while True: time.sleep(0.1)
except KeyboardInterrupt:
    print("caught", flush=True)
    sys.exit(5)
"""
WAIT = "while os.environ['WAY'] == 'warm' and not successor.waits(): pass\n"


@pytest.mark.parametrize("before", [WAIT, "successor.die()\n"], ids=["before it", "after it"])
def test_ctrl_c_reaches_the_job_that_runs_and_no_process_that_waits(job, before):
    job.write(
        "if 'LEARN' in os.environ: sys.exit()\n"
        f"print('up', sys.stdin.isatty(), sys.stdout.line_buffering, flush=True)\n{before}{PRESS}"
    )
    job.learn()
    seen = [at_terminal(job, way, "\x03") for way in WAYS]
    ends = [(status, plain(shown).replace("^C", "")) for status, shown in seen]
    assert ends[1] == ends[0]
    assert ends[0][1].count("caught") == 1
    job.nothing_lives()


SLOW = """
import fcntl, os, struct, sys, termios

def has_task():  # it lies in the pipe, and the program's text has been read
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            count = fcntl.ioctl(fd, termios.FIONREAD, b"\\0" * 4) if fd > 2 else b"\\0" * 4
        except OSError:
            continue
        if struct.unpack("i", count)[0]:
            return True

while sys.argv[0] == "-c":
    open("began", "w").close()
    if has_task():
        open("press", "w").close()
"""


def test_ctrl_c_while_it_still_imports_ends_the_run(job):
    job.package("slow", SLOW)
    job.write(
        "import slow\nif 'LEARN' in os.environ: sys.exit()\n"
        "if os.environ['SAFERUN_ATTEMPT'] == '1':\n"
        "    while not os.path.exists('began'): pass\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('never')\n"
    )
    job.learn()
    status, shown = at_terminal(job, "warm", "\x03")
    assert status in (130, -signal.SIGINT)
    assert "never" not in shown
    job.nothing_lives()
