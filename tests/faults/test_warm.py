"""What is started warm is as what is started now: ranks, a job of plain python, a torchrun."""

import importlib.util
import itertools

import pytest
from warm_jobs import Python, QuickLauncher, Ranks

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
