"""The rules between rooms: who may import what, and what a launch loads."""

from __future__ import annotations

import ast
import functools
import json
import os
import pathlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest
from cases import slow
from repo import committed

from saferun.planning.torchrun import torchrun_args

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "saferun"
# The rooms, top to bottom: an import goes down this list, never up.
ROOMS = (
    *("__main__", "cli", "api", "export", "supervise", "doctor", "gpu", "keeper", "journal"),
    *("planning", "profile", "diagnosis", "audit", "knowledge", "system", "inject"),
    *("base", "model", "settings", "errors"),
)
SITE = "inject/site"  # no package: a directory on PYTHONPATH
# What runs elsewhere and may lack the rest of saferun: room -> the rooms that it may import.
HOOKED = {"torch", "optuna", "numpy"}  # what a hook finds loaded where it runs
APART = {"base": {"base"}, "inject": {"inject", "base"}, "keeper": {"keeper", "base"}}
WORLD = {"os", "subprocess", "time", "random", "click", "filelock", "signal", "socket", "shutil"}


@functools.cache
def nodes(path: pathlib.Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported(path: pathlib.Path, *, types: bool = True) -> Iterator[str]:
    """The names that a file imports; those for the type checker alone only with `types`."""
    skipped = set() if types else {id(node) for node in checker_only(nodes(path))}
    for node in nodes(path):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = ("saferun", *path.relative_to(SOURCE).parent.parts) if node.level else ()
            above = here[: len(here) + 1 - node.level]
            module = ".".join((*above, *filter(None, [node.module])))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def checker_only(every: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in every:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for child in node.body:
                yield from ast.walk(child)


def room_of(path: pathlib.Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def rooms_of(path: pathlib.Path, *, types: bool = True) -> set[str]:
    """The rooms that a file imports from, its own too."""
    ours = [name.split(".") for name in imported(path, types=types) if name.startswith("saferun.")]
    return {clause[1] for clause in ours if clause[1] != "__version__"}


def test_arrows_between_rooms_go_down():
    up = [
        f"{path.relative_to(SOURCE)} (in {room}) imports {other}"
        for path in SOURCE.rglob("*.py")
        if (room := room_of(path)) in ROOMS
        for other in rooms_of(path)
        if ROOMS.index(other) < ROOMS.index(room)
    ]
    assert not up


def test_no_circle_of_imports():
    """Neither of modules nor, in a room, of the rooms and files within; types count, too."""
    names = {
        ".".join(("saferun", *path.relative_to(SOURCE).with_suffix("").parts)): path
        for path in SOURCE.rglob("*.py")
    }
    arrows = {
        name: {
            module
            for target in imported(path)
            for module in (target, target.rpartition(".")[0])
            if module in names and module != name
        }
        for name, path in names.items()
    }
    assert not circle(arrows)
    for room in {name.rpartition(".")[0] for name in names} - {"saferun"}:
        within: dict[str, set[str]] = {}
        for name, targets in arrows.items():
            if part := part_of(room, name):
                others = {part_of(room, target) for target in targets} - {"", part}
                within.setdefault(part, set()).update(others)
        assert not circle(within), room


def part_of(room: str, module: str) -> str:
    """The room or file right within a room that a module belongs to; "" for one elsewhere."""
    return module[len(room) + 1 :].partition(".")[0] if module.startswith(f"{room}.") else ""


def circle(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is left of a graph when all that leads to no circle is taken away."""
    while leaves := {name for name, targets in arrows.items() if not targets & set(arrows)}:
        arrows = {name: targets for name, targets in arrows.items() if name not in leaves}
    return arrows


def test_a_file_that_calls_itself_pure_touches_no_world():
    pure = [p for p in SOURCE.rglob("*.py") if p.read_text(encoding="utf-8").startswith('"""Pure')]
    assert pure
    for path in pure:
        assert not {name.split(".")[0] for name in imported(path)} & WORLD, path


def test_what_benchmarks_and_tools_import_is_there():
    """No suite starts most of them."""
    files = [file for place in ("benchmarks", "tools") for file in (ROOT / place).rglob("*.py")]
    assert len(files) > 20
    for name in (name for file in files for name in imported(file)):
        if name.startswith("saferun."):
            pkgutil.resolve_name(name)


def test_what_runs_elsewhere_needs_only_its_room_and_the_standard_library():
    for room, allowed in APART.items():
        for path in (SOURCE / room).rglob("*.py"):
            assert rooms_of(path, types=False) <= allowed, path
            tops = {name.split(".")[0] for name in imported(path, types=False)}
            foreign = tops - set(sys.stdlib_module_names) - {"_saferun", "saferun"} - HOOKED
            foreign -= {"sitecustomize"} if path.name == "sitecustomize.py" else set()
            assert not foreign, (path, foreign)
            assert not HOOKED & tops or "hooks" in path.parts, path


def test_only_sitecustomize_lies_on_the_childs_path():
    names = {p.name for p in (SOURCE / "inject" / "site").iterdir()} - {"__pycache__"}
    assert names == {"sitecustomize.py"}


def test_print_and_exit_stand_only_at_the_edge():
    for path in SOURCE.rglob("*.py"):
        if room_of(path) in ("cli", "__main__", "inject"):
            continue
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
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
from saferun.supervise import one_attempt
from saferun.__main__ import main
def started(*arguments, **options): raise KeyboardInterrupt
one_attempt.run_attempt = started
open('t.py', 'w').close()
main(['--profile', 'h100', 't.py'])
"""
HEAVY = {"torch", "rich", "jinja2", "asyncio", "socket", "shutil", "_hashlib"}


@pytest.mark.parametrize("launch", [LAUNCH, SUPERVISED], ids=["exec", "supervised"])
def test_a_launch_loads_nothing_heavy(tmp_path, launch):
    assert not (modules_of(launch, tmp_path) - modules_of("", tmp_path)) & HEAVY


def test_the_package_alone_loads_no_room(tmp_path):
    """A launch imports it, too."""
    loaded = modules_of("import saferun", tmp_path)
    assert {name for name in loaded if name.startswith("saferun")} == {"saferun"}


def test_help_loads_neither_torch_nor_click_nor_the_settings(tmp_path):
    code = "from saferun.__main__ import main; main(['--help'])"
    assert not modules_of(code, tmp_path) & {"torch", "click", "yaml", "saferun.settings"}


def test_a_keeper_for_which_each_attempt_waits_loads_no_typing(tmp_path):
    own = modules_of("import saferun.keeper.keeper", tmp_path) - modules_of("", tmp_path)
    assert own.isdisjoint({"typing", "contextlib", "asyncio", "subprocess"})


@pytest.mark.parametrize(
    "clause", [["env"], ["doctor"], *slow(["plan", "t.py"], ["profiles", "list"], ["gen-shell"])]
)
def test_no_command_imports_torch(tmp_path, clause):
    code = f"from saferun.__main__ import main; main({clause!r})"
    assert "torch" not in modules_of(code, tmp_path)


def test_saferuns_own_options_are_these_and_no_more():
    """Knobs are profile keys: a new flag needs a line in docs/usage.md first."""
    assert list(torchrun_args.OWN) == ["--profile", "--set", "--retries", "--run-dir", "--dry-run"]
    assert tuple(torchrun_args.COMMANDS) == (
        "run",
        "plan",
        "gen-shell",
        "adopt",
        "env",
        "profiles",
        "diagnose",
        "doctor",
        "runs",
        "help",
    )


def test_no_file_speaks_of_anything_but_the_project():
    bad = ("/" + "work/", "\u2014 generated by")
    for name in committed():
        path = ROOT / name
        if path.is_file():
            text = path.read_text(errors="replace", encoding="utf-8")
            assert not any(word in text for word in bad), name
