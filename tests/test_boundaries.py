"""The rules between rooms: who may import what, what a launch loads, what the README lists."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import subprocess
import sys

import pytest

from saferun import __main__ as door
from saferun import sbatch, torchrun
from saferun.schema import KEYS

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "saferun"
PURE = [
    "allocator",
    "audit",
    "conflicts",
    "cuda_errors",
    "cures",
    "doctor.checks_driver",
    "doctor.checks_gpu",
    "doctor.checks_host",
    "doctor.checks_links",
    "doctor.checks_network",
    "doctor.checks_speed",
    "doctor.page",
    "doctor.vitals",
    "doctor.xid",
    "envvars",
    "errors",
    "evidence",
    "exits",
    "failure",
    "findings",
    "headway",
    "lastwords",
    "logtext",
    "masking",
    "mitigations",
    "model",
    "oom",
    "page",
    "plan",
    "preflight_page",
    "progress",
    "raised",
    "readers",
    "resolve",
    "retry",
    "schema",
    "secrecy",
    "script",
    "scriptcalls",
    "signs",
    "smi",
    "torchrun",
    "twinsheet",
    "verdicts",
    "yamldoc",
    "yamlvalue",
]
WORLD = {"os", "subprocess", "time", "random", "click", "filelock", "signal", "socket", "shutil"}


def imported(path: pathlib.Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def file_of(room: str) -> pathlib.Path:
    return SOURCE / f"{room.replace('.', '/')}.py"


@pytest.mark.parametrize("room", PURE)
def test_a_pure_room_touches_no_world(room):
    tops = {name.split(".")[0] for name in imported(file_of(room))}
    allowed = {"os"} if room == "errors" else set()  # the numbers of sysexits.h
    assert not tops & (WORLD - allowed)


@pytest.mark.parametrize("room", PURE)
def test_a_pure_room_imports_only_pure_rooms(room):
    ours = {n.removeprefix("saferun.") for n in imported(file_of(room)) if n.startswith("saferun.")}
    rooms = {name for name in ours if file_of(name).is_file()}
    assert {n for n in rooms if not n.startswith(("inject.", "knowledge."))} <= set(PURE)


def test_the_childs_side_imports_nothing_above_it_and_only_the_standard_library():
    for path in (SOURCE / "inject").rglob("*.py"):
        tops = {name.split(".")[0] for name in imported(path)}
        foreign = tops - set(sys.stdlib_module_names) - {"_saferun_inject", "torch"}
        foreign -= {"sitecustomize"} if path.name == "sitecustomize.py" else set()  # the user's
        assert not foreign, (path, foreign)
        if "torch" in tops:
            assert path.parent.name == "hooks", path


def test_only_sitecustomize_lies_on_the_childs_path():
    names = {p.name for p in (SOURCE / "inject" / "site").iterdir()} - {"__pycache__"}
    assert names == {"sitecustomize.py"}


def test_print_and_exit_stand_only_at_the_edge():
    for path in SOURCE.rglob("*.py"):
        if path.name in ("cli.py", "__main__.py") or "inject" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("print", "sys.exit", "exit", "quit"), (path, called)


def modules_of(code: str, tmp_path: pathlib.Path) -> set[str]:
    tail = "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code + tail],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


LAUNCH = (
    "import os; os.execve = lambda *a: None; from saferun.__main__ import main; "
    "open('t.py', 'w').close(); main(['--retries', '0', '--profile', 'h100', 't.py'])"
)
# Up to the moment in which the job would be started.
SUPERVISED = """
from saferun import supervise
from saferun.__main__ import main
def started(*arguments, **options): raise KeyboardInterrupt
supervise.run_attempt = started
open('t.py', 'w').close()
main(['--profile', 'h100', 't.py'])
"""
HEAVY = ("torch", "click", "yaml", "filelock", "importlib.metadata", "dataclasses", "inspect")
HEAVY += ("subprocess", "logging", "pathlib", "argparse", "hashlib", "asyncio", "typing_extensions")


@pytest.mark.parametrize("launch", [LAUNCH, SUPERVISED], ids=["exec", "supervised"])
def test_a_launch_loads_nothing_heavy(tmp_path, launch):
    modules_of(launch, tmp_path)  # fills the cache of parsed profiles
    loaded = modules_of(launch, tmp_path)
    assert not loaded & set(HEAVY)
    assert ("saferun.attempt" in loaded) is (launch == SUPERVISED)


def test_help_loads_neither_torch_nor_click(tmp_path):
    code = "from saferun.__main__ import main; main(['--help'])"
    assert not modules_of(code, tmp_path) & {"torch", "click", "yaml"}


@pytest.mark.parametrize(
    "words", [["plan", "t.py"], ["profiles", "list"], ["env"], ["doctor"], ["gen-shell"]]
)
def test_no_command_imports_torch(tmp_path, words):
    code = f"from saferun.__main__ import main; main({words!r})"
    assert "torch" not in modules_of(code, tmp_path)


def test_saferuns_own_options_are_these_and_no_more():
    """Knobs are profile keys: a new flag needs a new line in the design first."""
    assert list(torchrun.OWN) == ["--profile", "--set", "--retries", "--run-dir", "--dry-run"]
    assert door.COMMANDS == (
        "run",
        "plan",
        "gen-shell",
        "env",
        "profiles",
        "diagnose",
        "doctor",
        "runs",
    )


def test_the_keys_of_a_profile_are_these_and_no_more():
    lines = (ROOT / "tests" / "records" / "profile-keys.txt").read_text().splitlines()
    assert [f"{key} = {spec.default}" for key, spec in KEYS.items()] == lines


@pytest.mark.parametrize(
    "word",
    [
        *[
            f"saferun {c}"
            for c in ("run", "plan", "gen-shell", "env", "profiles", "diagnose", "doctor")
        ],
        "saferun runs",
        *torchrun.OWN,
        "SAFERUN_DISABLE",
        "SAFERUN_PROFILE",
        "SAFERUN_SET",
        "SAFERUN_RETRIES",
        "SAFERUN_RUN_DIR",
        "SAFERUN_DRY_RUN",
        "SAFERUN_VERDICT_FILE",
        *sbatch.OPTIONS,
        *[f"| {code} |" for code in (2, 69, 70, 75, 78, 130)],
        "make demo",
        "make test",
    ],
)
def test_the_readme_lists(word):
    assert word in (ROOT / "README.md").read_text()


def test_no_file_speaks_of_anything_but_the_project():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    bad = ("/" + "work/", "\u2014 generated by")
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file():
            text = path.read_text(errors="replace")
            assert not any(word in text for word in bad), name
