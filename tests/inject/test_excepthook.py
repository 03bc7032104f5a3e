"""A rank's first uncaught exception is in torch elastic's error file, even without @record."""

import json
import sys

import pytest
from cases import slow
from interpreters import SITE, Interpreters, Ran, fake_torch
from repo import source
from sandbox import text_of, write

from saferun.diagnosis import signatures
from saferun.diagnosis.deciding import classify
from saferun.diagnosis.evidence import Evidence, rank_failure

ON = {"excepthook": "on"}


def rank(interpreters: Interpreters, script: str, hooks: dict | None = None, **extra: str) -> Ran:
    """Run a script as torchrun would run a rank, without torchrun."""
    path = interpreters.folder / "error.json"
    extra = {"RANK": "0", "TORCHELASTIC_ERROR_FILE": str(path), **extra}
    return interpreters.run(script, hooks=ON if hooks is None else hooks, **extra)


def recorded(interpreters: Interpreters) -> dict | None:
    path = interpreters.folder / "error.json"
    return json.loads(text_of(path))["message"] if path.exists() else None


FAIL = "def step(): raise ValueError('the root cause')\nstep()\n"


def test_an_exception_before_torch_is_imported_is_recorded(interpreters):
    rank(interpreters, FAIL)
    message = recorded(interpreters)
    assert message["message"] == "ValueError: the root cause"
    assert message["extraInfo"]["type"] == "ValueError"
    assert "in step" in message["extraInfo"]["py_callstack"]
    assert int(message["extraInfo"]["timestamp"]) == int(message["extraInfo"]["time_s"])


@pytest.mark.parametrize(
    "before",
    [
        "",
        "import sys; sys.excepthook = lambda *a: print('mine', a[0].__name__, file=sys.stderr)\n",
        "import sys; old = sys.excepthook\n"
        "def mine(*a):\n    print('first', file=sys.stderr); old(*a)\n"
        "sys.excepthook = mine\n",
        "import sys; sys.excepthook = sys.__excepthook__\n",
    ],
    ids=["none", "replaced", "chained", "put back"],
)
def test_what_is_printed_is_what_the_users_own_hook_prints(interpreters, before):
    bare = interpreters.run(before + FAIL, hooks=None)
    ours = rank(interpreters, before + FAIL)
    assert (ours.code, ours.out, ours.err) == (bare.code, bare.out, bare.err)
    assert recorded(interpreters) is not None


def test_a_hook_of_the_users_sitecustomize_still_runs(interpreters):
    users = interpreters.folder / "users"
    write(
        users / "sitecustomize.py",
        "import os, sys\n"
        "def mine(*a): print('recorded', os.path.exists(os.environ['TORCHELASTIC_ERROR_FILE']))\n"
        "sys.excepthook = mine\n",
    )
    ran = rank(interpreters, FAIL, PYTHONPATH=f"{SITE}:{users}")
    assert (ran.out, ran.err) == ("recorded True\n", ""), "a slow one would make it a late failure"


ENDINGS = {  # a script, the message that is recorded, and whether the rank says that it finished
    "success": ("pass", None, True),
    "exit 0": ("raise SystemExit(0)", None, True),
    "exit 3": ("raise SystemExit(3)", None, True),
    "exit word": ("import sys; sys.exit('a word')", None, True),
    "atexit": ("import atexit; atexit.register(print, 'the users own')", None, True),
    "caught": ("try: 1 / 0\nexcept Exception: pass", None, True),
    "thread": (
        "import threading as t; x = t.Thread(target=lambda: 1 / 0); x.start(); x.join()",
        None,
        True,
    ),
    "ctrl-c": ("raise KeyboardInterrupt", None, False),
    "crash at exit": ("import atexit, os; atexit.register(os.kill, os.getpid(), 11)", None, False),
    "hard exit": ("import os; os._exit(0)", None, False),
    "a fork alone": ("import os\nif os.fork(): os.wait(); os._exit(0)", None, False),
    "replaced": ("import sys; sys.excepthook = print; raise ValueError", "ValueError: ", False),
    "base": ("import asyncio\nraise asyncio.CancelledError('x')", "CancelledError: x", False),
    "str": ("class Odd(Exception):\n    def __str__(self): 1 / 0\nraise Odd", "Odd: ", False),
    "chain": (
        "try: 1 / 0\nexcept Exception as e: raise OSError('second') from e",
        "OSError: second",
        False,
    ),
    "odd": ("raise ValueError('\\ud800 \\n \\0')", "ValueError: \ud800 \n \0", False),
}


@pytest.mark.parametrize(("script", "expected", "finished"), ENDINGS.values(), ids=ENDINGS)
def test_failures_of_the_main_program_are_recorded_and_its_end_is_said_last(
    interpreters, script, expected, finished
):
    ran = rank(interpreters, script)
    message = recorded(interpreters)
    assert message is None if expected is None else message["message"].startswith(expected)
    outcomes = [line["outcome"] for line in ran.receipts if line["hook"] == "bootstrap"]
    assert outcomes == ["applied", *["finished"] * finished]


def test_an_existing_error_file_is_never_overwritten(interpreters):
    path = interpreters.folder / "error.json"
    write(path, "kept")
    ran = rank(interpreters, FAIL)
    assert (text_of(path), ran.messages()) == ("kept", [])


def test_an_unwritable_error_file_is_one_line(interpreters):
    ran = rank(interpreters, FAIL, TORCHELASTIC_ERROR_FILE="/proc/nowhere/error.json")
    assert ran.err.count("saferun: ") == 1
    assert ran.err.rstrip().endswith("ValueError: the root cause")


@pytest.mark.parametrize(
    "helper",
    [
        "import subprocess, sys; subprocess.call([sys.executable, '-c', '1/0'])",
        "import os\nif os.fork() == 0: 1 / 0\nos.wait()",
        "import multiprocessing as m\nif __name__ == '__main__':\n"
        "    p = m.get_context('spawn').Process(target=divmod, args=(1, 0)); p.start(); p.join()",
    ],
    ids=["a Python of its own", "a fork", "a spawned process"],
)
def test_a_failing_helper_of_the_rank_records_nothing(interpreters, helper):
    ran = rank(interpreters, helper)
    assert (ran.code, "ZeroDivisionError" in ran.err, recorded(interpreters)) == (0, True, None)


def test_outside_a_rank_sys_excepthook_is_untouched(interpreters):
    script = "import sys; print(sys.excepthook is sys.__excepthook__)"
    assert interpreters.run(script, hooks=ON).out == "True\n"


@pytest.mark.parametrize(
    ("hooks", "enabled"), [(ON, True), ({"excepthook": "off"}, False)], ids=["on", "off"]
)
def test_faulthandler_is_on_in_a_rank_and_off_is_off(interpreters, hooks, enabled):
    fake = fake_torch(interpreters.folder)
    script = "import torch, faulthandler; print(faulthandler.is_enabled())"
    ran = rank(interpreters, script + "; raise KeyError", hooks, PYTHONPATH=f"{SITE}:{fake}")
    assert (ran.out, bool(recorded(interpreters))) == (f"{enabled}\n", enabled), ran.err


WORKERS = """
import ctypes, sys, torch
class Data:
    def __len__(self): return 8
    def __getitem__(self, n):
        if n == 5: ctypes.string_at(0)
        return n
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Data(), 2, num_workers=1, multiprocessing_context="HOW")
    for batch in loader: pass
"""


@pytest.mark.parametrize(
    ("hooks", "how"), [(ON, "fork"), *slow((ON, "spawn"), ({"excepthook": "off"}, "fork"))]
)
def test_the_python_stack_of_a_loaders_worker_that_crashes_is_written(interpreters, hooks, how):
    script = WORKERS.replace("HOW", how)
    ran = rank(interpreters, script, hooks)
    assert ran.code == 1  # the signal, or the socket that the worker has left: whichever came first
    assert "Unexpected segmentation fault encountered in worker" in ran.err  # torch's own words
    assert ('script.py", line 6 in __getitem__' in ran.err) is (hooks is ON)


GROUP = "raise ExceptionGroup('two', [ExceptionGroup('in', [ValueError('leaf')]), OSError('b')])"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs Python 3.11, for exception groups")
def test_the_message_of_a_group_has_its_first_exception(interpreters):
    ran = rank(interpreters, GROUP)
    message = recorded(interpreters)
    assert message["message"].startswith("ExceptionGroup: two (2 sub-exceptions): ")
    assert message["message"].endswith(": ValueError: leaf")
    assert "OSError: b" in message["extraInfo"]["py_callstack"]
    assert ran.err.count("ValueError: leaf") == 1


THREAD = """
import threading, torch
from _saferun.inject.hook_runner import current
current("").activate()
def work(): raise KeyError("in the thread")
mine = threading.Thread(target=work, name="loader-3")
mine.start(); mine.join()
"""


def test_what_ends_a_thread_is_in_the_receipt_and_printed_as_without_us(interpreters):
    fake = fake_torch(interpreters.folder)
    ran = rank(interpreters, THREAD, ON, PYTHONPATH=f"{SITE}:{fake}")
    assert ran.err.count("Exception in thread loader-3:") == 1
    assert "inject" not in ran.err
    (line,) = [line for line in ran.by("excepthook") if "thread" in line]
    assert (line["thread"], line["error"]) == ("loader-3", "KeyError: 'in the thread'")
    assert "in work" in line["traceback"]


# real torchrun


@pytest.mark.parametrize(
    ("record", "hooks"), [("", ON), *slow(("yes", ON), ("", {"excepthook": "off"}))]
)
def test_torchruns_own_summary_names_the_root_cause(interpreters, torchrun, record, hooks):
    script = interpreters.folder / "two.py"
    write(script, source("inject/root_cause"))
    argv = (*torchrun, "--standalone", "--nproc-per-node=2", str(script))
    ran = interpreters.run(hooks=hooks, argv=argv, RECORD=record)
    assert ran.code == 1
    summary = ran.err[ran.err.index("Root Cause") :]
    if hooks is not ON:
        assert ("error_file: <N/A>" in summary, "ValueError" in summary) == (True, False)
        return
    assert "rank      : 1" in summary
    assert "ValueError: the root cause" in summary
    assert "error_file: <N/A>" not in summary


@pytest.mark.slow
def test_a_stderr_without_a_descriptor_is_no_fault(interpreters, tmp_path):
    """Scripts put a Tee there before they import torch."""
    ran = interpreters.run(
        source("inject/tee_without_descriptor"),
        hooks={"excepthook": "on"},
        RANK="0",
        WORLD_SIZE="1",
        TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"),
    )
    assert (ran.code, ran.out, ran.err) == (0, "True\n", "")


def test_an_error_file_appears_whole_or_not_at_all(interpreters):
    """torchrun ends ranks in the middle of this, and its own parser breaks on half a file."""
    seen = interpreters.folder / "seen"
    rank(interpreters, source("inject/slow_error_file"), SEEN=str(seen))
    assert recorded(interpreters)["message"] == "ValueError: " + "x" * 50
    copies = list(interpreters.receipts.glob("a1-r0-rank*.error.json"))
    assert [json.loads(text_of(copy))["message"] for copy in copies] == [recorded(interpreters)]
    file = interpreters.folder / "error.json"
    before_it, _, _ = text_of(seen).partition("y")  # then comes the supervisor's copy
    assert len(before_it) > 10
    assert [p.name for p in file.parent.glob("error.json*")] == ["error.json"]


def test_what_the_cuda_context_says_is_recorded_and_diagnosed(interpreters):
    """cuBLAS meets the assert of another line by words of its own; nobody waits for the GPU."""
    script = """
import sys, types
def query():
    raise RuntimeError("CUDA error: device-side assert triggered\\nCompile with")
stream = types.SimpleNamespace(query=query)
cuda = types.SimpleNamespace(is_initialized=lambda: True, current_stream=lambda: stream)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`")
"""
    ran = rank(interpreters, script)
    message = recorded(interpreters)
    assert message is not None, ran.err
    said = "RuntimeError: CUDA error: device-side assert triggered"
    assert message["extraInfo"]["cuda_context"] == said
    content = json.dumps({"message": message})
    evidence = Evidence(exit_code=1, failures=(rank_failure(0, content),))
    assert classify.classify(evidence, signatures.load()).kind == "device-side-assert"
