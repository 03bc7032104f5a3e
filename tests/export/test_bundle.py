"""What travels in a generated script: all that it imports, with its meaning unchanged."""

from __future__ import annotations

import ast
import functools
import json
import stat
from collections.abc import Iterator

import pytest
from cases import slow
from repo import ROOT, read_yaml
from sandbox import text_of, write

import saferun
from saferun.export import bundle
from saferun.export.bare_code import bare


class _Meaning(ast.NodeTransformer):
    """Takes away what a packed module may lack: docstrings and annotations."""

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not is_left_out(one)]
            if not isinstance(node, ast.ClassDef):
                node.body = [
                    ast.Assign([one.target], one.value, lineno=one.lineno)
                    if isinstance(one, ast.AnnAssign) and one.value
                    else one
                    for one in node.body
                ]
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        return node


def is_left_out(node: ast.stmt) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    text = isinstance(node, ast.Expr) and getattr(node.value, "value", None)
    return isinstance(text, str)


@pytest.fixture(autouse=True, scope="module")
def _each_module_is_made_bare_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "bare", functools.cache(bare))
        yield


def meant(tree: ast.Module) -> str:
    """Return what Python makes of a module, which is changed, with the lines of its statements."""
    tree = _Meaning().visit(tree)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return "\n".join(f"{one.lineno} {type(one).__name__}" for one in statements) + ast.dump(tree)


@pytest.mark.parametrize("every", [3, *slow(1)])
def test_what_is_packed_means_what_it_meant_on_the_same_lines(every):
    packed_files = bundle.packed_files()
    assert packed_files.pop("saferun/__init__.py") == f'__version__ = "{saferun.__version__}"\n'
    for path, text in list(packed_files.items())[::every]:
        if path.startswith("saferun/") and path.endswith(".py"):
            packed, whole = (ast.parse(text), ast.parse(text_of(ROOT / "src" / path)))
            assert meant(packed) == meant(whole), path
            assert not [line for line in text.split("\n") if line.startswith("# ---")], path


def test_what_only_readers_need_is_left_out_of_a_module():
    whole = '''from b import Wide

if TYPE_CHECKING:
    from c import C

class A:
    """Two
    lines."""

    field: Wide

Y: Wide = "->"  # gone
X = """
# kept
"""

def f(
    a: Wide,
    *b: "Wide",
    c: int = 3,
) -> dict[
    str, C
]: return {"# kept": a}  # é, gone
'''
    packed = '''from b import Wide




class A:
    ""


    field: Wide

Y = "->"
X = """
# kept
"""

def f(
    a,
    *b,
    c = 3,
)\\
\\
: return {"# kept": a}
'''
    assert bare(whole) == packed
    compile(packed, "packed", "exec")


def test_what_is_known_means_the_same_without_a_yaml_parser():
    packed_files = bundle.packed_files()
    for name in ("failures", "mitigations"):
        source = text_of(ROOT / "src" / "saferun" / "knowledge" / f"{name}.yaml")
        assert json.loads(packed_files[f"saferun/knowledge/{name}.json"]) == read_yaml(source)


def test_nothing_of_the_commands_is_packed():
    """That what is packed is enough, the runs of scripts show."""
    rooms = {path.split("/")[1] for path in bundle.packed_files() if path.count("/") > 1}
    assert not rooms & {"cli", "doctor", "audit"}


def test_what_was_packed_is_kept_for_this_user_until_a_source_changes(tmp_path, monkeypatch):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    packed = bundle.pack(environ)
    (kept,) = tmp_path.rglob("kit.json")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert bundle.pack(environ) == packed
    entry = json.loads(text_of(kept))
    program = entry["value"][0]
    entry["value"][1] = "KEPT"
    write(kept, json.dumps(entry))
    assert bundle.pack(environ) == (program, "KEPT")
    monkeypatch.setattr(bundle, "_MAIN", f"{bundle._MAIN}\n")
    changed = bundle.pack(environ)
    assert changed[0] == program
    assert changed[1] not in ("KEPT", packed[1])
    write(kept, text_of(kept)[:70])
    assert bundle.pack(environ) == changed
