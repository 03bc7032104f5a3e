"""The built wheel works alone, in a fresh environment: all rooms and data are inside.

It is built from the source distribution, which holds all that is committed.
"""

import os
import pathlib
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest
from repo import ROOT, SRC, committed
from sandbox import text_of, write


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    place = tmp_path_factory.mktemp("built")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", place, ROOT],
        check=True,
        capture_output=True,
    )
    return place


@pytest.fixture(scope="module")
def wheel(built: pathlib.Path) -> pathlib.Path:
    return next(built.glob("*.whl"))


def test_the_source_distribution_holds_all_that_is_committed(built):
    names_of_git = committed()
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in names_of_git if (ROOT / name).is_file()} - names == set()


def test_the_version_is_that_of_the_changelog_and_of_the_documents(wheel):
    heading = next(
        line for line in text_of(ROOT / "CHANGELOG.md").splitlines() if line[:3] == "## "
    )
    version = heading.split()[1]
    assert wheel.name == f"saferun-{version}-py3-none-any.whl"
    tools = text_of(ROOT / "docs" / "tools.md")
    assert re.findall(r"(?:rev: |saferun@)v(\S+)", tools) == [version] * 2


def test_the_page_of_a_package_index_has_no_dead_link(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        head, _, page = archive.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    assert re.findall(r"\]\((?!https?:)", page) == []
    named = re.findall(r"\(`([\w./-]+)`\)", page)
    assert "docs/start.md" in named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_wheel_holds_every_room_profiles_shell_and_types(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    package = [p for p in (SRC / "saferun").rglob("*") if p.suffix != ".pyc" and p.is_file()]
    wanted = {str(path.relative_to(SRC)) for path in package}  # all rooms, and their data
    for folder in ("profiles", "shell"):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        wanted |= {f"saferun/data/{path.relative_to(ROOT)}" for path in files}
    assert {"saferun/inject/site/sitecustomize.py", "saferun/py.typed"} <= wanted
    assert wanted - set(names) == set()
    assert not [n for n in names if n.startswith(("tests", "examples")) or "__pycache__" in n]


@pytest.fixture(scope="module")
def alone(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A fresh environment with the wheel and pyyaml and click, and no torch."""
    place = tmp_path_factory.mktemp("alone") / "env with blank"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = place / "lib" / version / "site-packages"
    zipfile.ZipFile(wheel).extractall(site)
    for package in ("click", "yaml"):
        found = pathlib.Path(__import__(package).__file__).parent
        (site / package).symlink_to(found)
    return place / "bin" / "python"


def test_it_launches_torch_of_another_environment(alone, tmp_path):
    """saferun in one environment, torch in another: the torchrun on PATH decides."""
    script = tmp_path / "t.py"
    write(script, "import sys\nprint(sys.executable, 'saferun' in sys.modules)\n")
    theirs = pathlib.Path(sys.executable).parent
    done = subprocess.run(
        [alone, "-m", "saferun", "--nproc-per-node=1", script],
        env={**os.environ, "HOME": str(tmp_path), "PATH": f"{theirs}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{sys.executable} False\n"
    assert done.stderr == "saferun: profile cpu (detected: no GPU)\n"
    receipts = list(tmp_path.glob(".local/state/saferun/runs/*/receipts/*.jsonl"))
    assert len(receipts) == 1, os.listdir(tmp_path)


def test_its_profiles_and_parts_of_scripts_are_found(alone, tmp_path):
    environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}

    def ran(*argv: str) -> str:
        command = [alone, "-m", "saferun", *argv]
        return subprocess.check_output(command, env=environ, text=True, cwd=tmp_path)

    ran("gen-shell", "--profile", "h100", "-o", "run.sh", "--", "t.py")
    assert "\njob torchrun t.py" in text_of(tmp_path / "run.sh")
    assert "nproc-per-node=gpu" in ran("plan", "--profile", "h100", "t.py")
