"""What travels in a generated script: all that it imports, with its meaning unchanged."""

from __future__ import annotations

import ast
import json
import os
import re
import stat

import yaml
from repo import ROOT

import saferun
from saferun.export import bundle


def meant(text: str) -> str:
    """Return what Python makes of a module, with the lines of its code, less its docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                del body[0]
    return "\n".join(
        f"{getattr(node, 'lineno', '')} {type(node).__name__}" for node in ast.walk(tree)
    ) + ast.dump(tree)


def test_what_is_packed_means_what_it_meant_on_the_same_lines():
    packed_files = bundle.files(os.environ)
    assert packed_files.pop("saferun/__init__.py") == f'__version__ = "{saferun.__version__}"\n'
    for path, text in packed_files.items():
        if path.startswith("saferun/") and path.endswith(".py"):
            whole = (ROOT / "src" / path).read_text()
            assert meant(text) == meant(whole), path
            assert not [line for line in text.split("\n") if line.startswith("# ---")], path


def test_a_string_and_a_body_of_nothing_but_a_docstring_are_left():
    text = 'class A:\n    """Two\n    lines."""\n\n\nX = """\n# kept\n"""  # kept\n# gone\n'
    assert bundle.bare(text) == 'class A:\n    ""\n\n\n\nX = """\n# kept\n"""  # kept\n\n'


def test_what_is_known_means_the_same_without_a_yaml_parser():
    packed_files = bundle.files(os.environ)
    for name in ("failures", "mitigations"):
        source = (ROOT / "src" / "saferun" / "knowledge" / f"{name}.yaml").read_text()
        assert json.loads(packed_files[f"saferun/knowledge/{name}.json"]) == yaml.safe_load(source)


IMPORT = re.compile(
    r"^ *(?:from (saferun[.\w]*) import (\([^)]*\)|.*)|import (saferun[.\w]*))", re.MULTILINE
)
STARTED = {"ask_nvml", "keeper_main", "bounded_main"}  # by their names, as programs
# What functions import that a script never calls: it reads no profile file, and has no audit.
UNCALLED = {"saferun/profile/yaml_reader", "saferun/audit/collect"}


def imported(text: str) -> set[str]:
    """Return the modules that a file may import, as paths."""
    found: set[str] = set()
    for room, names, whole in IMPORT.findall(text):
        base = (room or whole).replace(".", "/")
        found |= {base, *(f"{base}/{name}" for name in re.findall(r"\w+", names))}
    return {path for path in found if is_module(path)}


def is_module(path: str) -> bool:
    place = ROOT / "src" / path
    return place.is_dir() or place.with_suffix(".py").is_file()


def test_what_the_script_imports_is_packed_and_nothing_else():
    """The hooks are not asked: a rank imports them by name."""
    packed_files = {
        path[:-3]: text for path, text in bundle.files(os.environ).items() if path.endswith(".py")
    }
    wanted: set[str] = set().union(*map(imported, packed_files.values()))
    files = {name for name in wanted if (ROOT / "src" / f"{name}.py").is_file()}
    assert files - packed_files.keys() == UNCALLED
    modules = {path for path in packed_files if path.count("/") > 1 and "/inject/" not in path}
    left = {path for path in modules - wanted if not path.endswith("/__init__")}
    assert {path.rpartition("/")[2] for path in left} == STARTED


def test_what_was_packed_is_kept_for_this_user_until_a_source_changes(tmp_path, monkeypatch):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    packed = bundle.pack(environ)
    (kept,) = tmp_path.rglob("kit")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert bundle.pack(environ) == packed
    key, program, _ = kept.read_text().split("\n")
    kept.write_text(f"{key}\n{program}\nKEPT")
    assert bundle.pack(environ) == (program, "KEPT")
    monkeypatch.setattr(bundle, "_MAIN", f"{bundle._MAIN}\n")
    changed = bundle.pack(environ)
    assert changed[0] == program
    assert changed[1] not in ("KEPT", packed[1])
    kept.write_text(kept.read_text()[:70])
    assert bundle.pack(environ) == changed


def test_without_a_cache_the_same_is_packed(tmp_path):
    place = tmp_path / "cache"
    place.write_text("no directory")
    assert bundle.pack({"XDG_CACHE_HOME": str(place)}) == bundle.pack(os.environ)
