"""Which torch a torchrun will import, read from where its Python keeps it."""

import subprocess
import sys
from pathlib import Path

import pytest
from sandbox import executable, python_program, shell, text_of, write
from torch_files import TORCHRUN, path_of, torch_in

from saferun.planning import request
from saferun.planning.torchrun.torchrun_install import find_launcher, torch_version


def environment(root: Path, *, cfg: str | None = None, tag: str = "3.11", exe: str = "") -> Path:
    """Make a fake Python below root; return its bin/torchrun."""
    real = executable(root / "bin" / (exe or f"python{tag}"), "")
    if real.name != "python":
        (root / "bin" / "python").symlink_to(real.name)
    if cfg is not None:
        write(root / "pyvenv.cfg", cfg)
    (root / "lib" / f"python{tag}" / "site-packages").mkdir(parents=True)
    return executable(
        root / "bin" / "torchrun", python_program(TORCHRUN, python=root / "bin/python")
    )


def version_seen(torchrun: Path, **environ: str) -> str | None:
    environ = {**path_of(torchrun.parent), **environ}
    return torch_version(find_launcher(environ), environ)


LAYOUTS = {
    "conda or pyenv": ({}, "lib/python3.11/site-packages"),
    "Debian": ({}, "lib/python3/dist-packages"),
    "Fedora": ({}, "lib64/python3.11/site-packages"),
    "venv": ({"cfg": "home = /nonexistent/bin\n"}, "lib/python3.11/site-packages"),
    "virtualenv with copies": (
        {"cfg": "home=/nonexistent/bin\nversion_info = 3.12.1.final.0\n", "exe": "python"},
        "lib/python3.12/site-packages",
    ),
    "copies that tell nothing": ({"exe": "python"}, "lib/python3.11/site-packages"),
}


@pytest.mark.parametrize(("how", "folder"), list(LAYOUTS.values()), ids=list(LAYOUTS))
def test_the_version_is_read_from_where_that_python_keeps_torch(how, folder, tmp_path):
    torchrun = environment(tmp_path / "root", **how)
    assert version_seen(torchrun) is None
    torch_in(tmp_path / "root" / folder, "2.8.0+cu128")
    assert version_seen(torchrun) == "2.8.0+cu128"


VERSION_FILES = {
    "2.13": ("__version__ = '2.13.0+cpu'\n", "2.13.0+cpu"),
    "vendor's": ('__all__ = []\n__version__ = "2.6.0a0+ecf3bae40a.nv25.01"\n', "2.6.0a0"),
    "annotated": ("__version__: str = '2.1'\n", "2.1"),
    "without one": ("debug = False\n", None),
    "not text": ("\x00\x01", None),
}


@pytest.mark.parametrize(("text", "version"), list(VERSION_FILES.values()), ids=list(VERSION_FILES))
def test_the_version_file_of_any_build_is_understood(text, version, tmp_path):
    torchrun = environment(tmp_path)
    torch_in(tmp_path / "lib/python3.11/site-packages", "0")
    write(tmp_path / "lib/python3.11/site-packages/torch/version.py", text)
    seen = version_seen(torchrun)
    assert seen == version if version is None else seen.startswith(version)


@pytest.mark.parametrize(("version", "is_asked"), [("2.11.0+cu130", False), ("2.11.0a0", True)])
def test_the_python_of_a_released_torch_is_not_started_for_its_options(version, is_asked, tmp_path):
    torchrun, asked = environment(tmp_path / "root"), tmp_path / "asked"
    executable(tmp_path / "root" / "bin" / "python3.11", f"#!/bin/sh\n: >{shell(asked)}\n")
    torch_in(tmp_path / "root/lib/python3.11/site-packages", version)
    environ = {**path_of(torchrun.parent), "HOME": str(tmp_path)}
    assert request.read(["train.py", "--steps=2"], environ).line.script == "train.py"
    assert asked.exists() is is_asked


def test_a_torch_without_a_version_hides_the_one_behind_it(tmp_path):
    torchrun = environment(tmp_path / "root")
    torch_in(tmp_path / "root/lib/python3.11/site-packages", "2.8.0")
    torch_in(tmp_path / "source", None)
    assert version_seen(torchrun, PYTHONPATH=str(tmp_path / "source")) is None


REAL_CASES = {
    "its own": ({}, "venv"),
    "PYTHONPATH": ({"PYTHONPATH": "/none:{extra}"}, "extra"),
    "PYTHONPATH, relative": ({"PYTHONPATH": "extra"}, "extra"),
    "user site is not a venv's": ({"PYTHONUSERBASE": "{user}"}, "venv"),
}


@pytest.fixture(scope="module")
def real_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real environment of this Python, with torches of different versions all around it."""
    root = tmp_path_factory.mktemp("real")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], check=True)
    tag = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    torch_in(root / "venv" / "lib" / tag / "site-packages", "1.0+venv")
    torch_in(root / "extra", "1.0+extra")
    torch_in(root / "user" / "lib" / tag / "site-packages", "1.0+user")
    executable(
        root / "venv/bin/torchrun",
        python_program("import torch\nprint(torch.__version__)\n", python=root / "venv/bin/python"),
    )
    return root


def imported(root: Path, environ: dict[str, str]) -> str:
    """The version that the program itself gets when it is started."""
    command = [root / "venv" / "bin" / "torchrun"]
    run = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True, check=True)
    return run.stdout.strip()


@pytest.mark.parametrize(("extra", "version"), list(REAL_CASES.values()), ids=list(REAL_CASES))
@pytest.mark.parametrize("hidden", [False, True], ids=["torch in it", "torch in its user site"])
def test_a_real_environment_imports_the_version_that_we_read(
    extra, version, hidden, real_venv, monkeypatch
):
    monkeypatch.chdir(real_venv)
    places = {"extra": real_venv / "extra", "user": real_venv / "user"}
    environ = {**path_of(real_venv / "venv" / "bin")}
    environ.update({name: value.format(**places) for name, value in extra.items()})
    config = real_venv / "venv" / "pyvenv.cfg"
    before = text_of(config)
    own = next((real_venv / "venv" / "lib").glob("python*")) / "site-packages" / "torch"
    try:
        if hidden:  # a system-wide look: the user site comes into play
            write(config, before.replace("packages = false", "packages = true"))
            own.rename(own.with_name("hidden"))
            environ["PYTHONUSERBASE"] = str(places["user"])
            version = {"venv": "user"}.get(version, version)
        assert imported(real_venv, environ) == f"1.0+{version}"
        assert torch_version(find_launcher(environ), environ) == f"1.0+{version}"
    finally:
        write(config, before)
        if hidden:
            own.with_name("hidden").rename(own)


def test_flags_of_the_first_line_close_the_user_site_and_pythonpath(tmp_path):
    torchrun = environment(tmp_path / "root")
    torch_in(tmp_path / "user/lib/python3.11/site-packages", "1+user")
    torch_in(tmp_path / "extra", "1+extra")
    both = {"PYTHONUSERBASE": str(tmp_path / "user"), "PYTHONPATH": str(tmp_path / "extra")}
    assert version_seen(torchrun, PYTHONUSERBASE=both["PYTHONUSERBASE"]) == "1+user"
    assert version_seen(torchrun, **both, PYTHONNOUSERSITE="1") == "1+extra"
    executable(torchrun, python_program(TORCHRUN, "-E", python=tmp_path / "root/bin/python"))
    assert version_seen(torchrun, **both) == "1+user"
    executable(torchrun, python_program(TORCHRUN, "-I", python=tmp_path / "root/bin/python"))
    assert version_seen(torchrun, **both) is None


@pytest.mark.parametrize(
    ("system", "version"), [("false", None), ("true", "1+base")], ids=["closed", "open"]
)
def test_a_venv_sees_its_bases_packages_only_where_it_says_so(system, version, tmp_path):
    environment(tmp_path / "base")
    torch_in(tmp_path / "base/lib/python3.11/site-packages", "1+base")
    cfg = f"home = {tmp_path}/base/bin\ninclude-system-site-packages = {system}\n"
    assert version_seen(environment(tmp_path / "venv", cfg=cfg)) == version
