"""A process of plain python that replaces another one: warm, beside one that is started."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from cases import few, slow
from helpers import children, until
from sandbox import SAFERUN, output, text_of, write
from warm_jobs import DIES, WAYS, Python, at_terminal, plain

SAID = "saferun: start.ranks is warm, but a process is started as usual: "


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
    assert (done.returncode, SAID in done.stderr) == (0, False), done.stderr
    first, second = text_of(log).split()
    assert done.stdout == f"{second} ä ['--x']\n"
    assert first != second
    assert [start.split()[0] for start in job.starts()] == ["ahead"]
    shown = output(*SAFERUN, "runs", "show", job.last().name, env=job.environ)
    assert re.search(r"ranks +warm: \d+ modules imported ahead, in [\d.]+ s", shown)


ODD = {
    "prints": "print('hello')\nFOUND = 1",
    "fails ahead": "import sys\nFOUND = sys.modules['__main__'].HERE",
}


@pytest.mark.parametrize("text", few(ODD, "prints"))
def test_a_module_whose_import_would_differ_is_left_to_the_job(job, text):
    listed, ahead = _around_odd(job, text)
    assert ahead == listed.index("odd")


def test_a_thread_is_no_reason_since_nothing_is_forked(job):
    text = (
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "FOUND = threading.active_count()"
    )
    listed, ahead = _around_odd(job, text)
    assert {"odd", "after"} <= set(listed[:ahead])


def _around_odd(job, text):
    """Return what is listed, and how much of it is imported ahead of the second process."""
    job.package("before", "")
    job.package("odd", text)
    job.package("after", "")
    job.write(f"HERE = 1\nimport before, odd, after\n{DIES}print(odd.FOUND)\n")
    job.learn()
    done = [job.run(way) for way in WAYS]
    assert done[1].stdout == done[0].stdout
    assert SAID not in done[1].stderr
    path = min(job.cache.glob("imports/*"))  # a note of `odd` comes after it
    return text_of(path).split("\n"), int(job.starts()[0].split()[1])


CHANGES = {
    "a changed package": ("version.write_text('NUMBER = 2\\n')", "has changed since"),
    "a module beside the script": (
        "version.with_name('x').parents[3].joinpath('part.py').write_text('')",
        "part.py has the name of a module",
    ),
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES)
def test_what_cannot_be_equal_is_started_and_the_reason_is_said_once(job, change, reason):
    package = job.package("part", "NUMBER = 1\n")
    job.write(
        "import pathlib, part\nprint(part.NUMBER if hasattr(part, 'NUMBER') else 'beside')\n"
        "if 'LEARN' not in os.environ and os.environ['SAFERUN_ATTEMPT'] == '1':\n"
        "    while not successor.waits(): pass\n"
        f"    version = pathlib.Path({str(package)!r})\n    {change}\n" + DIES
    )
    job.learn()
    done = job.run("warm")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == ("2" if "version.write_text" in change else "beside")
    assert done.stderr.count(SAID) == 1
    assert reason in done.stderr
    assert job.starts()[0].startswith("spawn ")


def test_a_variable_that_a_module_of_the_users_assigns_is_known_from_the_run_before(job):
    job.package("hub", "import os\nHOME = os.environ.get('HUB_HOME', 'default')\n")
    write(job.folder / "settings.py", "import os\nos.environ['HUB' + '_HOME'] = '/data'\n")
    job.write(f"import settings, hub\n{DIES}print(hub.HOME)\n")
    job.learn()
    done = job.run("warm")
    assert done.stdout == "/data\n"
    assert SAID + "HUB_HOME is set after what reads it was imported" in done.stderr


def test_a_variable_that_an_import_assigns_is_no_reason(job):
    job.package("sets", "import os\nos.environ.setdefault('OF_SETS', '1')\n")
    job.write(f"import sets\n{DIES}print(os.environ['OF_SETS'])\n")
    job.learn()
    done = job.run("warm")
    assert (done.stdout, SAID in done.stderr) == ("1\n", False)
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
try:
    open("press", "w").close()
    signal.pause()
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
