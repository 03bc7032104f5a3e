"""The user's own sitecustomize runs as it would without ours."""

import os
import sys
from pathlib import Path

import pytest
from interpreters import NEUTRAL, SITE, both


def user_site(folder: Path, text: str) -> Path:
    site = folder / "users"
    site.mkdir()
    (site / "sitecustomize.py").write_text(text, encoding="utf-8")
    return site


CHAIN = """
import sys
print("user", __name__, __file__ == {path!r}, __spec__.origin == {path!r})
"""


@pytest.mark.parametrize("hooks", [None, NEUTRAL], ids=["inert", "armed"])
def test_the_users_sitecustomize_runs_once_under_its_own_name(interpreters, hooks):
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
def test_a_failing_sitecustomize_of_the_users_ends_as_it_would_without_us(interpreters, body):
    site = user_site(interpreters.folder, body)
    after = "import sys; print('ran', 'sitecustomize' in sys.modules)"
    bare = interpreters.run(after, PYTHONPATH=str(site))
    ours = interpreters.run(after, hooks=NEUTRAL, PYTHONPATH=both(SITE, site))
    assert (ours.code, ours.out) == (bare.code, bare.out)
    assert last_line(ours.err) == last_line(bare.err)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def test_without_one_sitecustomize_is_as_absent_as_before(interpreters):
    script = """
try:
    import sitecustomize
    print(sitecustomize.__file__)
except ImportError as error:
    print(error.name)
"""
    bare = interpreters.run(script, PYTHONPATH="")
    assert interpreters.run(script, hooks=NEUTRAL).out == bare.out


def test_reloading_the_users_sitecustomize_reloads_the_users(interpreters):
    site = user_site(interpreters.folder, "print('user')")
    script = "import importlib, sitecustomize; importlib.reload(sitecustomize)"
    ran = interpreters.run(script, hooks=NEUTRAL, PYTHONPATH=both(SITE, site))
    assert ran.out == "user\nuser\n"


LATE = """
import os
os.environ["PYTHONPATH"] = os.pathsep.join(["/another", os.environ["PYTHONPATH"]])
"""
AGENT = "import os, torch.distributed.elastic.agent.server.api; print(os.environ['PYTHONPATH'])"


def test_an_agent_hands_its_ranks_our_directory_first_after_a_usercustomize(interpreters):
    site = user_site(interpreters.folder, "")
    (site / "usercustomize.py").write_text(LATE, encoding="utf-8")
    folder = interpreters.folder / "torch"
    for name in ("distributed", "elastic", "agent", "server"):
        folder = folder / name
    folder.mkdir(parents=True)
    for package in (folder, *list(folder.parents)[:4]):
        (package / "__init__.py").touch()
    (folder / "api.py").touch()
    agent = interpreters.folder / "torchrun"
    agent.write_text(AGENT, encoding="utf-8")
    path = both(SITE, site)
    # A virtual environment has no usercustomize.
    python = os.path.realpath(sys.executable)
    ran = interpreters.run(hooks=NEUTRAL, argv=(str(agent),), python=python, PYTHONPATH=path)
    assert ran.out == both(SITE, "/another", site) + "\n", ran.err
