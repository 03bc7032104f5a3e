"""The injected bootstrap: inert, light, chained and honest, in real interpreters."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interpreters import SITE, Interpreters
from repo import source

from saferun.inject import bootstrap, contract
from saferun.inject.targets import TARGETS

ARMED = """
import sys, _frozen_importlib
print("armed" if "saferun" in _frozen_importlib._find_spec.__module__ else "not armed")
"""
NEUTRAL = {"excepthook": "on"}


def other_pythons() -> list[Path]:
    found = Path.home().joinpath(".pyenv/versions").glob("3.*/bin/python")
    wanted = [p for p in found if tuple(map(int, p.parts[-3].split(".")[:2])) >= (3, 9)]
    return sorted(wanted) or [Path(sys.executable)]


def user_site(folder: Path, text: str) -> Path:
    site = folder / "users"
    site.mkdir()
    (site / "sitecustomize.py").write_text(text)
    return site


def both(*entries: object) -> str:
    return os.pathsep.join(map(str, entries))


def fake_torch(folder: Path, body: str = "") -> Path:
    """A package named torch that costs nothing, for what does not need the real one."""
    package = folder / "fake" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import sys\ncompile = len\nnow = (__spec__.loader, __loader__)\n" + body
    )
    return package.parent


# arming


def test_without_a_contract_nothing_is_armed(interpreters: Interpreters) -> None:
    ran = interpreters.run(ARMED + "print([m for m in sys.modules if 'saferun' in m])")
    assert ran.out.split("\n")[:2] == ["not armed", "[]"]


@pytest.mark.parametrize("python", other_pythons(), ids=lambda p: p.parts[-3])
def test_every_python_from_3_9_on_is_armed_without_saferun(
    interpreters: Interpreters, python: Path
) -> None:
    fake = fake_torch(interpreters.folder)
    ran = interpreters.run(
        ARMED + "import torch; print(torch.__spec__.loader is torch.__loader__)",
        hooks={"compile": {"enabled": "off"}},
        python=str(python),
        PYTHONPATH=both(SITE, fake),
    )
    assert (ran.code, ran.out.split(), ran.err) == (0, ["armed", "True"], "")


def test_arming_imports_neither_json_nor_re_nor_importlib_nor_torch(
    interpreters: Interpreters,
) -> None:
    show = "import sys; print(' '.join(sorted(sys.modules)))"
    bare = set(interpreters.run(show).out.split())
    armed = set(interpreters.run(show, hooks=NEUTRAL).out.split())
    assert {m for m in armed - bare if not m.startswith("_saferun_inject")} == set()


def test_arming_starts_no_thread(interpreters: Interpreters) -> None:
    count = "import os; print(len(os.listdir('/proc/self/task')))"
    assert interpreters.run(count, hooks=NEUTRAL).out == "1\n"


def test_the_site_directory_twice_on_the_path_arms_once(interpreters: Interpreters) -> None:
    ran = interpreters.run(
        "import _frozen_importlib as i; first = i._find_spec\n"
        "print(sum(c.cell_contents.__name__ == '_find_spec' for c in first.__closure__ "
        "if callable(c.cell_contents) and 'saferun' in c.cell_contents.__module__))",
        hooks=NEUTRAL,
        PYTHONPATH=both(SITE, SITE, f"{SITE}/"),
    )
    assert ran.out == "0\n"  # ours wraps importlib's own, not ours once more


def test_sys_path_is_what_it_would_be_without_us(interpreters: Interpreters) -> None:
    show = "import sys; print(sys.path)"
    bare = interpreters.run(show, PYTHONPATH="relative").out
    assert interpreters.run(show, hooks=NEUTRAL, PYTHONPATH=both(SITE, "relative")).out == bare


def test_relative_entries_of_the_user_work_after_a_change_of_directory(
    interpreters: Interpreters,
) -> None:
    folder = interpreters.folder / "mods"
    folder.mkdir()
    (folder / "users_module.py").write_text("value = 7")
    ran = interpreters.run(
        "import os; os.chdir('/'); import users_module; print(users_module.value)",
        hooks=NEUTRAL,
        PYTHONPATH=both(SITE, "mods"),
    )
    assert ran.out == "7\n"


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_a_python_that_ignores_its_environment_leaves_no_receipt(
    interpreters: Interpreters, flag: str
) -> None:
    ran = interpreters.run(ARMED, hooks=NEUTRAL, flags=(flag,), RANK="0")
    assert (ran.out, ran.receipts) == ("not armed\n", [])


def test_children_of_the_job_are_armed_through_the_environment(interpreters: Interpreters) -> None:
    script = (
        f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {ARMED!r}]))"
    )
    assert "b'armed" in interpreters.run(script, hooks=NEUTRAL).out


def test_spawned_children_are_armed(interpreters: Interpreters) -> None:
    assert interpreters.run(source("inject/spawned_child"), hooks=NEUTRAL).out == "True\n"


@pytest.mark.parametrize(
    ("argv", "kind"),
    [
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
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[1:])[:50] or "none",
)
def test_a_command_line_tells_jobs_from_agents_and_helpers(argv: list[str], kind: str) -> None:
    assert bootstrap.kind_of(argv) == kind


def test_the_first_python_of_a_rank_is_marked_and_its_helpers_are_not(
    interpreters: Interpreters,
) -> None:
    child = "import os; print(os.environ['SAFERUN_RANK_PID'] == str(os.getpid()))"
    script = (
        f"{child}\nimport subprocess, sys; sys.stdout.flush()\n"
        f"subprocess.call([sys.executable, '-c', {child!r}])"
    )
    assert interpreters.run(script, hooks=NEUTRAL, RANK="1").out == "True\nFalse\n"


def test_an_agent_forgets_the_rank_mark_that_it_inherited(interpreters: Interpreters) -> None:
    agent = interpreters.folder / "torchrun"
    agent.write_text(ARMED + "import os; print(os.environ.get('SAFERUN_RANK_PID'))")
    ran = interpreters.run(hooks=NEUTRAL, argv=(str(agent),), RANK="0", SAFERUN_RANK_PID="1")
    assert ran.out == "not armed\nNone\n"


# the user's own sitecustomize

CHAIN = """
import sys
print("user", __name__, __file__ == {path!r}, __spec__.origin == {path!r})
"""


@pytest.mark.parametrize("hooks", [None, NEUTRAL], ids=["inert", "armed"])
def test_the_users_sitecustomize_runs_once_under_its_own_name(
    interpreters: Interpreters, hooks: dict | None
) -> None:
    path = str(interpreters.folder / "users" / "sitecustomize.py")
    site = user_site(interpreters.folder, CHAIN.format(path=path))
    script = "import sitecustomize, importlib; print(sitecustomize.__file__)"
    ran = interpreters.run(script, hooks=hooks, PYTHONPATH=both(SITE, site))
    assert ran.out == f"user sitecustomize True True\n{path}\n"
    assert ran.err == ""


@pytest.mark.parametrize(
    "body",
    [
        "raise ValueError('from the user')",
        "raise SystemExit(3)",
        "import a_module_that_is_not_there",
        "raise KeyboardInterrupt",
        "import os; os._exit(4)",
        "def broken(:",
        "import sys; sys.modules.pop(__name__)",
    ],
    ids=["error", "exit", "import error", "interrupt", "hard exit", "syntax", "removes itself"],
)
def test_its_failures_end_as_they_would_without_us(interpreters: Interpreters, body: str) -> None:
    site = user_site(interpreters.folder, body)
    after = "import sys; print('ran', 'sitecustomize' in sys.modules)"
    bare = interpreters.run(after, PYTHONPATH=str(site))
    ours = interpreters.run(after, hooks=NEUTRAL, PYTHONPATH=both(SITE, site))
    assert (ours.code, ours.out) == (bare.code, bare.out)
    assert last_line(ours.err) == last_line(bare.err)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def test_without_one_sitecustomize_is_as_absent_as_before(interpreters: Interpreters) -> None:
    script = """
try:
    import sitecustomize
    print(sitecustomize.__file__)
except ImportError as error:
    print(error.name)
"""
    bare = interpreters.run(script, PYTHONPATH="")
    assert interpreters.run(script, hooks=NEUTRAL).out == bare.out


def test_reloading_the_users_sitecustomize_reloads_the_users(interpreters: Interpreters) -> None:
    site = user_site(interpreters.folder, "print('user')")
    script = "import importlib, sitecustomize; importlib.reload(sitecustomize)"
    ran = interpreters.run(script, hooks=NEUTRAL, PYTHONPATH=both(SITE, site))
    assert ran.out == "user\nuser\n"


# the finder


def test_a_hooked_module_keeps_its_own_loader_already_while_it_executes(
    interpreters: Interpreters,
) -> None:
    fake = fake_torch(interpreters.folder)
    script = """
import torch, inspect, importlib, pickle, pkgutil, importlib.util
print([type(l).__name__ for l in torch.now], type(torch.__loader__).__name__)
print("compile = len" in inspect.getsource(torch), pkgutil.resolve_name("torch") is torch)
print(pickle.loads(pickle.dumps(torch.__spec__)).name, importlib.reload(torch) is torch)
print(type(torch.__spec__.loader).__name__)
"""
    ran = interpreters.run(script, hooks=NEUTRAL, PYTHONPATH=both(SITE, fake))
    assert ran.out.splitlines() == [
        "['SourceFileLoader', 'SourceFileLoader'] SourceFileLoader",
        "True True",
        "torch True",
        "SourceFileLoader",
    ], ran.err


def test_a_hooked_package_may_come_from_a_zip_or_be_a_namespace(
    interpreters: Interpreters,
) -> None:
    fake = fake_torch(interpreters.folder)
    packed = interpreters.folder / "packed.zip"
    subprocess.run([sys.executable, "-m", "zipfile", "-c", packed, "torch"], cwd=fake, check=True)
    ran = interpreters.run(
        "import torch; print(torch.__file__, type(torch.__loader__).__name__)",
        hooks=NEUTRAL,
        PYTHONPATH=both(SITE, packed),
    )
    assert ran.out == f"{packed}/torch/__init__.py zipimporter\n"
    bare = interpreters.folder / "bare"
    (bare / "torch").mkdir(parents=True)
    alone = interpreters.folder / "alone"  # a Python that has no torch
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", alone], check=True)
    ran = interpreters.run(
        "import torch; print(torch.__file__)",
        hooks=NEUTRAL,
        flags=("-s",),
        python=str(alone / "bin" / "python"),
        PYTHONPATH=both(SITE, bare),
    )
    assert (ran.code, ran.out) == (0, "None\n")


@pytest.mark.parametrize(
    "body", ["raise OSError('broken torch')", "import not_there"], ids=["error", "import error"]
)
def test_an_error_in_a_hooked_module_passes_unchanged(
    interpreters: Interpreters, body: str
) -> None:
    fake = fake_torch(interpreters.folder, body)
    script = """
import sys
try:
    import torch
except Exception as error:
    print(repr(error), "torch" in sys.modules, error.__cause__, error.__context__)
"""
    bare = interpreters.run(script, PYTHONPATH=str(fake))
    assert interpreters.run(script, hooks=NEUTRAL, PYTHONPATH=both(SITE, fake)).out == bare.out


FINDERS = [
    "one in front that finds nothing",
    "one at the end",
    "one in front that finds everything",
    "one in front that asks the others",
    "all replaced",
]


@pytest.mark.parametrize("finder", FINDERS)
@pytest.mark.parametrize("how", ["import", "import_module"])
def test_a_module_is_hooked_whichever_finder_finds_it_and_none_is_starved(
    interpreters: Interpreters, finder: str, how: str
) -> None:
    ran = interpreters.run(
        source("inject/other_finder"),
        hooks={"compile": {"enabled": "off"}},
        PYTHONPATH=both(SITE, fake_torch(interpreters.folder)),
        FINDER=finder,
        HOW=how,
    )
    assert ran.out == "True SourceFileLoader False\nFalse\n", ran.err


def test_the_finders_stay_as_they_are(interpreters: Interpreters) -> None:
    show = "import sys; print([*map(type, sys.meta_path)], type(sys.meta_path))"
    assert interpreters.run(show, hooks=NEUTRAL).out == interpreters.run(show).out


def test_what_a_sitecustomize_imported_is_hooked_too_with_the_names_taken_from_it(
    interpreters: Interpreters,
) -> None:
    fake = fake_torch(interpreters.folder, "def compile(model): return 'compiled'\n")
    (interpreters.folder / "taker.py").write_text("from torch import compile as taken")
    # Before ours: a .pth file, or a sitecustomize of the interpreter's own.
    import_first = (
        "import taker, runpy\n"
        f"try: runpy.run_path({str(SITE / 'sitecustomize.py')!r})\n"
        "except ImportError: pass  # there is no other sitecustomize\n"
    )
    script = (
        import_first + "import torch; print(torch.compile is taker.taken, taker.taken.__name__)"
    )
    script += "; print(hasattr(torch.compile, '__wrapped__'))"
    environ = interpreters.environ(
        {"compile": {"enabled": "off"}}, PYTHONPATH=both(fake, interpreters.folder)
    )
    ran = interpreters.run(argv=("-c", script), environ=environ)
    assert ran.out == "True compile\nTrue\n", ran.err


BY_HAND = """
import importlib.util, sys
found = importlib.util.find_spec("torch")
sys.modules["torch"] = torch = type(sys)("torch")
torch.__spec__ = found
exec(open(found.origin).read(), torch.__dict__)
"""
ACTIVE = """
import os
from _saferun_inject.context import current
current(os.environ["SAFERUN_INJECT"]).activate()
"""
STATES = {
    "plain": (ACTIVE + "import torch", "applied"),
    "none": (ACTIVE, "not imported"),
    "by hand, before the process is active": (BY_HAND + ACTIVE, "applied"),
    "by hand, and never seen again": (ACTIVE + BY_HAND, "missed"),
    "replaced": (ACTIVE + "import torch; torch.compile = len", "missed"),
    "wrapped": (
        ACTIVE + "import torch; old = torch.compile; torch.compile = lambda *a: old(*a)",
        "applied",
    ),
}


@pytest.mark.parametrize(("script", "state"), STATES.values(), ids=STATES)
def test_a_receipt_tells_what_became_of_each_target(
    interpreters: Interpreters, script: str, state: str
) -> None:
    fake = fake_torch(interpreters.folder)
    hooks = {"compile": {"enabled": "off"}}
    ran = interpreters.run(script, hooks=hooks, PYTHONPATH=both(SITE, fake), RANK="0")
    first, *later = [line["targets"] for line in ran.by("targets")]
    assert set(first) == set(TARGETS), ran.err
    reported = {name: found for line in (first, *later) for name, found in line.items()}
    assert reported == {**dict.fromkeys(TARGETS, "not imported"), "torch": state}
    assert (ran.code, ran.err) == (0, "")


# honesty


def test_an_unreadable_contract_is_one_line_and_the_job_runs(interpreters: Interpreters) -> None:
    fake = fake_torch(interpreters.folder)
    environ = interpreters.environ(None, SAFERUN_INJECT="{broken", PYTHONPATH=both(SITE, fake))
    ran = interpreters.run("import torch; print('ran')", environ=environ)
    assert (ran.code, ran.out) == (0, "ran\n")
    assert ran.err.startswith("saferun: inject: SAFERUN_INJECT: ")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("required", [False, True])
def test_a_hook_that_cannot_be_applied_ends_the_job_only_where_required(
    interpreters: Interpreters, required: bool
) -> None:
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


WRITES = source("inject/write_receipts")


def test_the_receipts_of_hooks_wait_until_the_process_is_active(
    interpreters: Interpreters,
) -> None:
    fake = fake_torch(interpreters.folder)
    path = both(SITE, fake)
    idle = interpreters.run("import torch", hooks=NEUTRAL, PYTHONPATH=path, RANK="3")
    assert (idle.code, [line["hook"] for line in idle.receipts]) == (0, ["bootstrap"])
    shutil.rmtree(interpreters.receipts)
    ran = interpreters.run(
        WRITES, hooks=NEUTRAL, PYTHONPATH=path, RANK="3", TORCHELASTIC_RESTART_COUNT="2"
    )
    assert [(line["n"], line["rank"]) for line in ran.by("test", "applied")] == [(1, 3)]
    (file,) = interpreters.receipts.iterdir()
    assert file.name.startswith("a1-r2-rank3-pid")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(interpreters.receipts.stat().st_mode) == 0o700


def test_receipts_are_appended_and_never_follow_a_link(interpreters: Interpreters) -> None:
    fake = fake_torch(interpreters.folder)
    interpreters.receipts.mkdir()
    target = interpreters.folder / "precious"
    target.write_text("mine")
    (interpreters.folder / "script.py").write_text(WRITES + "print('done')")
    link = f"ln -s {target} {interpreters.receipts}/a1-r0-rank0-pid$$.jsonl"
    ran = interpreters.run(
        python="/bin/sh",
        argv=("-c", f"{link} && exec {sys.executable} {interpreters.folder}/script.py"),
        hooks=NEUTRAL,
        PYTHONPATH=both(SITE, fake),
        RANK="0",
    )
    assert (ran.code, ran.out.splitlines()[-1:], target.read_text()) == (0, ["done"], "mine")
    assert ran.err == ""


@pytest.mark.parametrize("where", ["/dev/full/x", "/proc/nowhere", "/dev/null/x"])
def test_an_unwritable_receipt_stops_no_job(interpreters: Interpreters, where: str) -> None:
    fake = fake_torch(interpreters.folder)
    interpreters.receipts = Path(where)
    ran = interpreters.run(
        WRITES + "print('done')", hooks=NEUTRAL, PYTHONPATH=both(SITE, fake), RANK="0"
    )
    assert (ran.code, ran.out.splitlines()[-1], ran.err) == (0, "done", "")


def test_a_forked_helper_of_an_active_rank_leaves_no_receipt(interpreters: Interpreters) -> None:
    fake = fake_torch(interpreters.folder)
    script = WRITES + (
        "import os\n"
        "if os.fork() == 0:\n    context.receipt('child', 'applied'); os._exit(0)\n"
        "os.wait()\n"
    )
    ran = interpreters.run(script, hooks=NEUTRAL, PYTHONPATH=both(SITE, fake), RANK="0")
    assert ran.by("test")
    assert ran.by("child") == []


def test_a_script_may_clear_its_environment_before_it_imports_torch(
    interpreters: Interpreters,
) -> None:
    fake = fake_torch(interpreters.folder)
    ran = interpreters.run(
        "import os; os.environ.clear(); import torch; print(torch.compile is len)",
        hooks={"compile": {"enabled": "off"}},
        PYTHONPATH=both(SITE, fake),
    )
    assert (ran.out, ran.err) == ("False\n", "")


# a rank's first line


@pytest.mark.parametrize("python", other_pythons(), ids=lambda p: p.parts[-3])
def test_a_rank_says_at_its_start_that_the_hooks_run(
    interpreters: Interpreters, python: Path
) -> None:
    before = time.time()
    script = "import os; print(os.getpid())"
    facts = {"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    agents = {
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_ERROR_FILE": "/tmp/t/\u00e9/error.json",
    }
    ran = interpreters.run(script, hooks=NEUTRAL, python=str(python), **facts, **agents)
    line = ran.receipts[0]
    assert before <= line.pop("at") <= time.time()
    assert line == {
        "v": 1,
        "pid": int(ran.out),
        "rank": 5,
        "hook": "bootstrap",
        "outcome": "applied",
        "local_rank": 1,
        "local_world_size": 4,
        "error_file": "/tmp/t/\u00e9/error.json",
    }
    (file,) = interpreters.receipts.iterdir()
    assert file.name == f"a1-r2-rank5-pid{int(ran.out)}.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", os.fsdecode(b"\xff")], ids=range(4))
def test_a_path_that_json_writes_otherwise_is_left_out(
    interpreters: Interpreters, name: str
) -> None:
    ran = interpreters.run("", hooks=NEUTRAL, RANK="0", TORCHELASTIC_ERROR_FILE=f"/tmp/{name}/e")
    assert ran.receipts[0]["outcome"] == "applied"
    assert "error_file" not in ran.receipts[0]


def test_the_hooks_go_on_in_the_file_that_the_rank_began(interpreters: Interpreters) -> None:
    fake = fake_torch(interpreters.folder)
    ran = interpreters.run(WRITES, hooks=NEUTRAL, PYTHONPATH=both(SITE, fake), RANK="0")
    hooks = [line["hook"] for line in ran.receipts]
    assert (hooks[0], hooks[-1]) == ("bootstrap", "test")
    assert len(list(interpreters.receipts.iterdir())) == 1


@pytest.mark.parametrize(
    ("script", "extra"),
    [
        ("", {}),
        ("", {"RANK": "0", "SAFERUN_RANK_PID": "1"}),
        ("", {"RANK": "0", "SAFERUN_AGENT_PID": "1"}),
    ],
    ids=["no rank", "a helper of a rank", "not the agent's child"],
)
def test_a_process_that_is_no_rank_leaves_none(
    interpreters: Interpreters, script: str, extra: dict[str, str]
) -> None:
    assert interpreters.run(script, hooks=NEUTRAL, **extra).receipts == []


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK"])
@pytest.mark.parametrize("odd", ["", "x", "007", '1,"pid":2'])
def test_odd_numbers_in_the_environment_make_no_odd_line(
    interpreters: Interpreters, variable: str, odd: str
) -> None:
    ran = interpreters.run(hooks=NEUTRAL, **{"RANK": "3", variable: odd})
    (line,) = ran.receipts
    assert line[variable.lower()] == (7 if odd == "007" else None)
    assert ran.err == ""


@pytest.mark.parametrize("where", [True, False], ids=["a directory", "no directory"])
@pytest.mark.parametrize("spaces", [False, True], ids=["as encoded", "as json writes"])
def test_a_ranks_start_needs_neither_json_nor_re(
    interpreters: Interpreters, where: bool, spaces: bool
) -> None:
    show = "import sys; print(' '.join(sorted(sys.modules)))"
    bare = set(interpreters.run(show).out.split())
    reported = json.loads(interpreters.contract(NEUTRAL))
    reported["receipts"] = reported["receipts"] if where else None
    text = (
        json.dumps(reported)
        if spaces
        else contract.encode(**{k: reported[k] for k in reported if k != "v"})
    )
    agent = str(os.getpid())
    environ = interpreters.environ(None, SAFERUN_INJECT=text, RANK="0", SAFERUN_AGENT_PID=agent)
    ran = interpreters.run(show, environ=environ)
    assert bool(ran.receipts) == where
    more = {m for m in set(ran.out.split()) - bare if not m.startswith("_saferun_inject")}
    assert more == {"_ctypes", "atexit"}  # both built in or there already; atexit costs nothing


ODD_CONTRACTS = [
    {"receipts": None},
    {"receipts": "/r"},
    {"receipts": '/with "quotes" and \\ and \n'},
    {"receipts": "/ümlaut \udcff"},
    {"receipts": "/r", "hooks": {"receipts": "/other", "attempt": 9}},
    {"receipts": None, "hooks": {"receipts": "/other", "attempt": 9}},
    {"receipts": "/r", "mitigations": ['"attempt":9,"receipts":"/other"', "x\\"]},
    {"receipts": "/r", "run": '","receipts":"/other'},
    {"receipts": "/r", "attempt": 1234567},
]


@pytest.mark.parametrize("odd", ODD_CONTRACTS, ids=str)
def test_the_directory_and_the_attempt_are_cut_out_of_a_contract_exactly(odd: dict) -> None:
    whole = {"run": "r", "attempt": 3, "hooks": {"a": {"b": 1}}, "mitigations": [], **odd}
    text = contract.encode(**whole)
    expected = (whole["receipts"], whole["attempt"])
    assert contract.receipt_location(text) == expected
    assert contract.receipt_location(json.dumps(json.loads(text))) == expected


@pytest.mark.parametrize("text", ["", "{broken", "[]", '{"v":2,"attempt":"x"}', "null"])
def test_what_is_no_contract_has_no_directory(interpreters: Interpreters, text: str) -> None:
    with pytest.raises(ValueError):
        contract.receipt_location(text)
    environ = interpreters.environ(None, RANK="0", SAFERUN_INJECT=text)
    ran = interpreters.run("print('ran')", environ=environ)
    assert (ran.out, ran.err) == ("ran\n", "")


@given(
    attempt=st.integers(0, 10**6),
    receipts=st.none() | st.text(),
    run=st.text(),
    hooks=st.dictionaries(st.text() | st.just("receipts"), st.text() | st.integers()),
    mitigations=st.lists(st.text('"\\:,{}receiptsattempt')),
)
def test_cutting_a_contract_agrees_with_reading_it(**whole: object) -> None:
    text = contract.encode(**whole)
    read = contract.decode(text)
    assert contract.receipt_location(text) == (read["receipts"], read["attempt"])


# real torch

IMPORT_TORCH = """
import sys, torch
print(" ".join(sorted(m for m in sys.modules if m.split(".")[0] == "torch")))
"""


@pytest.mark.slow
def test_torch_imports_what_it_imports_without_us(interpreters: Interpreters) -> None:
    bare = interpreters.run(IMPORT_TORCH, PYTHONPATH="").out
    hooks = {
        "compile": {"enabled": "off", "autotune": "off", "cudagraphs": "off", "fallback": "on"},
        "cudagraph_markers": "off",
    }
    ours = interpreters.run(IMPORT_TORCH, hooks=hooks, RANK="0")
    assert (ours.out, ours.err) == (bare, "")


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_only_the_process_that_compiled_leaves_a_receipt(
    interpreters: Interpreters, start: str
) -> None:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "START": start}
    ran = interpreters.run(source("inject/compile_beside_workers"), hooks=NEUTRAL, **rank)
    assert ran.code == 0, ran.err
    assert len(list(interpreters.receipts.iterdir())) == 1


def test_a_python_that_a_shell_runs_on_the_way_is_not_the_rank(
    interpreters: Interpreters, torchrun: tuple[str, ...], tmp_path: Path
) -> None:
    """Under --no-python the shell is the rank, until it execs."""
    reported = tmp_path / "reported"
    mark = "import os; print(os.environ.get('SAFERUN_RANK_PID') == str(os.getpid()))"
    (tmp_path / "mark.py").write_text(mark)
    shell = tmp_path / "rank.sh"
    shell.write_text(
        f"#!/bin/bash\n{sys.executable} {tmp_path}/mark.py >{reported}.1\n"
        f"exec {sys.executable} {tmp_path}/mark.py >{reported}.2\n"
    )
    shell.chmod(0o755)
    environ = interpreters.environ(NEUTRAL)
    arguments = [*torchrun, "--standalone", "--no-python", str(shell)]
    subprocess.run(arguments, env=environ, check=True, capture_output=True, timeout=500)
    assert [Path(f"{reported}.{n}").read_text() for n in (1, 2)] == ["False\n", "True\n"]


def test_an_older_python_is_left_alone(interpreters: Interpreters, tmp_path: Path) -> None:
    old = sorted(Path("~/.pyenv/versions").expanduser().glob("2.7*/bin/python"))
    if not old:
        pytest.skip("no Python 2.7 on this machine")
    quiet = {"PYTHONDONTWRITEBYTECODE": "1"}  # 2.7 would write beside our source
    ran = interpreters.run("print('fine')", hooks=NEUTRAL, python=str(old[0]), **quiet)
    assert (ran.code, ran.out, ran.err) == (0, "fine\n", "")


def test_an_agent_does_not_look_for_garbage_when_it_ends(interpreters: Interpreters) -> None:
    """Its status and what it registered for its end stay as they are."""
    folder = interpreters.folder / "torch" / "distributed"
    folder.mkdir(parents=True)
    for place in (folder, folder.parent):
        (place / "__init__.py").write_text("")
    (folder / "run.py").write_text(source("inject/agent_with_a_cycle"))
    ran = interpreters.run(argv=("-m", "torch.distributed.run"), hooks={})
    assert (ran.code, ran.out) == (3, "registered, frozen 0\n")


@pytest.mark.parametrize(("then", "status"), [("print('done')", 0), ("raise KeyError('x')", 1)])
def test_hooks_that_vanish_while_a_rank_runs_cost_lines_and_nothing_else(
    interpreters: Interpreters, then: str, status: int
) -> None:
    hooks, fake = interpreters.folder / "inject", fake_torch(interpreters.folder)
    shutil.copytree(Path(SITE).parent, hooks)
    script = f"import shutil; shutil.rmtree({str(hooks)!r}); import torch; " + then
    path = both(hooks / "site", fake)
    ran = interpreters.run(script, hooks=NEUTRAL, PYTHONPATH=path, RANK="0")
    assert ran.code == status
    assert ran.out == ("done\n" if status == 0 else "")
    own = [line for line in ran.err.splitlines() if "saferun" in line]
    assert own
    assert all(line.startswith("saferun: inject: ") for line in own), ran.err
    assert ran.err.count("Traceback") == status
    assert ("KeyError: 'x'" in ran.err) == bool(status)
