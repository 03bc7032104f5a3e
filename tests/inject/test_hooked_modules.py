"""A module that hooks wait for is found, loaded and seen as it would be without us."""

import subprocess
import sys

import pytest
from interpreters import NEUTRAL, SITE, both, fake_torch
from repo import source
from sandbox import write


def test_a_hooked_module_keeps_its_own_loader_already_while_it_executes(interpreters):
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


def test_a_hooked_package_may_come_from_a_zip(interpreters):
    fake = fake_torch(interpreters.folder)
    packed = interpreters.folder / "packed.zip"
    subprocess.run([sys.executable, "-m", "zipfile", "-c", packed, "torch"], cwd=fake, check=True)
    ran = interpreters.run(
        "import torch; print(torch.__file__, type(torch.__loader__).__name__)",
        hooks=NEUTRAL,
        PYTHONPATH=both(SITE, packed),
    )
    assert ran.out == f"{packed}/torch/__init__.py zipimporter\n"


@pytest.mark.parametrize(
    "body", ["raise OSError('broken torch')", "import not_there"], ids=["error", "import error"]
)
def test_an_error_in_a_hooked_module_passes_unchanged(interpreters, body):
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


@pytest.mark.parametrize(
    ("finder", "how"),
    [
        ("one in front that finds nothing", "import"),
        ("one at the end", "import_module"),
        ("one in front that finds everything", "import"),
        ("one in front that asks the others", "import_module"),
        ("all replaced", "import"),
    ],
)
def test_a_module_is_hooked_whichever_finder_finds_it_and_none_is_starved(
    interpreters, finder, how
):
    ran = interpreters.run(
        source("inject/other_finder"),
        hooks={"compile": {"enabled": "off"}},
        PYTHONPATH=both(SITE, fake_torch(interpreters.folder)),
        FINDER=finder,
        HOW=how,
    )
    assert ran.out == "True SourceFileLoader False\nFalse\n", ran.err


def test_what_a_sitecustomize_imported_is_hooked_too_with_the_names_taken_from_it(interpreters):
    fake = fake_torch(interpreters.folder, "def compile(model): return 'compiled'\n")
    write(interpreters.folder / "taker.py", "from torch import compile as taken")
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


# real torch

IMPORT_TORCH = """
import sys, torch
print(" ".join(sorted(m for m in sys.modules if m.split(".")[0] == "torch")))
"""


@pytest.mark.slow
def test_torch_imports_what_it_imports_without_us(interpreters):
    bare = interpreters.run(IMPORT_TORCH, PYTHONPATH="").out
    hooks = {
        "compile": {"enabled": "off", "autotune": "off", "cudagraphs": "off", "fallback": "on"},
        "cudagraph_markers": "off",
    }
    ours = interpreters.run(IMPORT_TORCH, hooks=hooks, RANK="0")
    assert (ours.out, ours.err) == (bare, "")
