"""What is started warm is as what is started now: ranks, a job of plain python, a torchrun."""

import importlib.util
import itertools

import pytest
from cases import slow
from sandbox import write
from warm_jobs import DIES, Python, QuickLauncher, Ranks, says

KINDS = {"ranks": Ranks, "python": Python, "agent": QuickLauncher}
# What it does, and whether that is a failure.
ENDINGS = {
    "exception": ("raise ValueError('of the user')", True),
    "last words": ("raise SystemExit('last words')", True),
    "status": ("sys.exit(3)", True),
    "at once": ("os._exit(4)", True),
    "crash": ("os.kill(os.getpid(), signal.SIGSEGV)", True),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", True),
    "interrupt": ("raise KeyboardInterrupt", True),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT)", True),
    "chained": ("exec('try:\\n  1/0\\nexcept Exception as e:\\n  raise KeyError(1) from e')", True),
    "thread": ("threading.Thread(target=lambda: 1/0).start()", False),
    "bytes": ("os.write(2, bytes(range(256)) * 9000)", False),  # of the agent alone
    "atexit": ("import atexit; atexit.register(print, 'bye'); print('hi')", False),
}
QUICK = {("python", name) for name in ("chained", "status", "crash")}
QUICK |= {("agent", name) for name in ENDINGS}


def needs_torch() -> None:
    if not all(map(importlib.util.find_spec, ("torch", "numpy"))):
        pytest.skip("needs torch and numpy")


@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        pytest.param(kind, name, marks=() if (kind, name) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for name in ENDINGS
        if kind == "agent" or name != "bytes"
    ],
)
def test_it_ends_as_one_that_was_started(tmp_path, kind, ending):
    if kind == "ranks":
        needs_torch()
    body, fails = ENDINGS[ending]
    with KINDS[kind](tmp_path) as job:
        started, warm = job.endings(body, fails)
        assert kind != "python" or job.starts()[0].startswith(job.warm)
    assert warm == started
    assert (started[0] != 0) is fails


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words", "at"),
    [
        ("ranks", ("train.py", "--x", "ä"), "pipes"),
        ("ranks", ("-m", "train", "y"), "pipes"),
        ("python", ("job.py", "--x", "ä"), "pipes"),
        ("python", ("job.py", "--x", "ä"), "a terminal"),
        ("python", ("-m", "job", "y"), "pipes"),
        ("python", ("-m", "job", "y"), "a terminal"),
    ],
)
def test_it_sees_what_a_started_one_sees(tmp_path, kind, words, at):
    needs_torch()
    with KINDS[kind](tmp_path) as job:
        started, warm = job.facts(at, *words)
        assert all(start.startswith(job.warm) for start in job.starts())
    for one, other in zip(started, warm, strict=True):
        if kind == "ranks":
            assert other["alike"]["rank_in_proc"]
            one["alike"]["cmdline"] = other["alike"]["cmdline"] = None  # cut off at the agent's end
        importers = [set(facts["alike"]["late"].pop("importers")) for facts in (one, other)]
        assert importers[0] <= importers[1]
        assert other["alike"] == one["alike"]
    drawn = [facts["different"] for facts in (*started, *warm)]
    for one, other in itertools.combinations(drawn, 2):
        assert [name for name in one if one[name] == other[name]] == []


THREAD = (
    "import threading\n"
    "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    "FOUND = threading.active_count()"
)
SETS = "import os\nos.environ.setdefault('KMP_DUPLICATE_LIB_OK', 'True')\n"  # as scikit-learn does
ODD = {  # a package's text
    "prints": "print('hello')\nFOUND = 1",
    "fails ahead": "import sys\nFOUND = sys.modules['__main__'].HERE",
    "reads RANK": "import os\nFOUND = os.environ.get('RANK')",
    "starts a thread": THREAD,
    "starts a thread, and assigns what OpenMP reads": SETS + THREAD,
    "starts a thread beside OpenBLAS's": THREAD,
}
SHOWN = says("(odd.FOUND, threading.active_count())")


@pytest.mark.parametrize(
    ("kind", "odd"),
    [
        ("python", "prints"),
        *slow(("python", "fails ahead"), ("python", "starts a thread")),
        *slow(*(("ranks", odd) for odd in ODD)),
    ],
)
def test_a_module_whose_import_would_differ_is_left_to_it(tmp_path, kind, odd):
    if kind == "ranks":
        needs_torch()
    words, env = (), {}
    if "OpenBLAS" in odd:  # it starts one thread then
        words, env = ("--nproc-per-node=1", "train.py"), {"OMP_NUM_THREADS": "2"}
    with KINDS[kind](tmp_path) as job:
        for name, text in {"before": "", "odd": ODD[odd], "after": ""}.items():
            job.package(name, text)
        job.write(f"HERE = 1\nimport before, odd, after\n{job.dies}{SHOWN}")
        job.learn(*words, **env)
        started = job.run("spawn", *words, **env)
        for _ in job.ranks:
            warm = job.run("warm", *words, **env)
            assert sorted(warm.stdout.split()) == sorted(started.stdout.split())
            assert job.said not in warm.stderr
            assert all(start.startswith(job.warm) for start in job.starts())
        is_fork = kind == "ranks"
        assert job.left() == ("odd" if is_fork or "thread" not in odd else "")


CHANGES = {  # what attempt 1 does once the next one waits, what is read then, and the reason
    "a changed package": ("package.write_text('NUMBER = 2\\n')", "2", "has changed since"),
    "a module beside the script": (
        "pathlib.Path('part.py').write_text('NUMBER = 3')",
        "3",
        "part.py has the name of a module",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["python", *slow("ranks")])
def test_what_cannot_be_equal_is_started_and_the_reason_is_said_once(tmp_path, kind, change):
    act, number, reason = CHANGES[change]
    with KINDS[kind](tmp_path) as job:
        package = job.package("part", "NUMBER = 1\n")
        job.write(
            f"import pathlib, part\npackage = pathlib.Path({str(package)!r})\n"
            f"{DIES.replace('die()', f'die(lambda: {act})')}{says('part.NUMBER')}"
        )
        job.learn()
        done = job.run("warm")
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-len(job.ranks) :] == [number] * len(job.ranks)
        assert done.stderr.count(job.said) == 1
        assert reason in done.stderr
        assert job.starts()[-1].startswith("spawn")


@pytest.mark.parametrize(
    ("kind", "first", "words"),
    [
        ("python", "import settings", ()),
        *slow(
            ("ranks", "os.environ['HUB_HOME'] = '/data'", ()),
            ("ranks", "import settings", ()),
            ("ranks", "import settings", ("-m", "train")),
        ),
    ],
)
def test_a_variable_that_is_set_before_what_reads_it_is_a_reason(tmp_path, kind, first, words):
    """What another module assigns is known from the run before."""
    with KINDS[kind](tmp_path) as job:
        job.package("hub", "import os\nHOME = os.environ.get('HUB_HOME', 'default')\n")
        write(job.folder / "settings.py", "import os\nos.environ['HUB' + '_HOME'] = '/data'\n")
        job.write(f"{first}\nimport hub\n{job.dies}{says('hub.HOME')}")
        job.learn(*words)
        done = job.run("warm", *words)
        assert done.stdout.split() == ["/data"] * len(job.ranks), done.stderr
        assert job.said + "HUB_HOME is set after what reads it was imported" in done.stderr
