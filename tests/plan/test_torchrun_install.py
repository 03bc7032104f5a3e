"""Which torchrun the user has, found by looking at files; its options, asked of its own Python."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import until
from repo import source

from saferun.errors import UnavailableError
from saferun.knowledge.torchrun_options import OPTIONS, TABLE_TORCH
from saferun.model import Option
from saferun.plan import torchrun_probe
from saferun.plan.torchrun_install import Launcher, find_launcher, torch_version, worker_interpreter
from saferun.plan.torchrun_probe import option_table

TORCHRUN = "import sys\nfrom torch.distributed.run import main\nsys.exit(main())\n"
ROOT = Path(__file__).resolve().parents[2]


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def torch_in(folder: Path, version: str | None) -> None:
    """Put a torch into a folder: as little of it as there must be to be imported."""
    package = folder / "torch"
    package.mkdir(parents=True)
    text = "from .version import __version__\n" if version else "__version__ = 'unknown'\n"
    (package / "__init__.py").write_text(text, encoding="utf-8")
    if version:
        lines = f"from typing import Optional\n__version__ = '{version}'\ndebug = False\n"
        (package / "version.py").write_text(lines, encoding="utf-8")


def path_of(*folders: Path) -> dict[str, str]:
    return {"PATH": os.pathsep.join(map(str, folders)), "HOME": "/nonexistent"}


@pytest.fixture
def no_torch_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])


# --- which program


def test_the_first_executable_torchrun_on_path_counts(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "torchrun").write_text("not executable")
    (tmp_path / "b" / "torchrun").mkdir(parents=True)
    program(tmp_path / "c" / "torchrun", "#!/opt/env/bin/python3.12\n" + TORCHRUN)
    program(tmp_path / "d" / "torchrun", "#!/usr/bin/python3\n" + TORCHRUN)
    launcher = find_launcher(path_of(*(tmp_path / name for name in ("none", "a", "b", "c", "d"))))
    assert launcher.argv == (str(tmp_path / "c" / "torchrun"),)
    assert launcher.interpreter == "/opt/env/bin/python3.12"


PIP = "'''exec' {} \"$0\" \"$@\"\n' '''\n" + TORCHRUN
FIRST_LINES = {
    "plain": ("#!/v/bin/python\n" + TORCHRUN, "/v/bin/python", ""),
    "with a version": ("#!/v/bin/python3.11\n" + TORCHRUN, "/v/bin/python3.11", ""),
    "free-threaded": ("#!/v/bin/python3.13t\n" + TORCHRUN, "/v/bin/python3.13t", ""),
    "with flags": ("#! /usr/bin/python3 -sP\n" + TORCHRUN, "/usr/bin/python3", "sP"),
    "env": ("#!/usr/bin/env python3\n" + TORCHRUN, "{bin}/python3", ""),
    "env -S": ("#!/usr/bin/env -S A=1 python3 -s -E\n" + TORCHRUN, "{bin}/python3", "sE"),
    "env of a missing Python": ("#!/usr/bin/env python2\n" + TORCHRUN, None, ""),
    "pip, blanks": ("#!/bin/sh\n" + PIP.format('"/my env/bin/python"'), "/my env/bin/python", ""),
    "pip, a long path": ("#!/bin/sh\n" + PIP.format("/l/bin/python3.12"), "/l/bin/python3.12", ""),
    "conda, flags": ("#!/bin/sh\n" + PIP.format("/c/bin/python -s"), "/c/bin/python", "s"),
    "uv, quoted": ("#!/bin/sh\n" + PIP.format("'/my env/bin/python3'"), "/my env/bin/python3", ""),
    "uv, can be moved": (
        "#!/bin/sh\n" + PIP.format('"$(dirname -- "$(realpath -- "$0")")"/\'python3\''),
        "{bin}/python3",
        "",
    ),
    "pyenv's shim": ("#!/usr/bin/env bash\nset -e\nexec pyenv exec torchrun\n", None, ""),
    "a shell wrapper": ('#!/bin/sh\nexec /opt/torchrun "$@"\n', None, ""),
    "a binary": ("\x7fELF\x02\x01\n", None, ""),
    "empty": ("", None, ""),
}


@pytest.mark.parametrize(
    ("text", "interpreter", "flags"), list(FIRST_LINES.values()), ids=list(FIRST_LINES)
)
def test_the_first_lines_name_the_interpreter(text, interpreter, flags, tmp_path):
    program(tmp_path / "torchrun", text)
    program(tmp_path / "python3", "a Python")
    launcher = find_launcher(path_of(tmp_path))
    assert launcher.argv == (str(tmp_path / "torchrun"),)
    assert launcher.interpreter == (interpreter and interpreter.format(bin=tmp_path))
    assert launcher.flags == flags


def test_pips_two_lines_really_start_the_interpreter_that_we_read(tmp_path):
    home = tmp_path / "my env"
    program(home / "python3", '#!/bin/sh\necho "started $0"\n')
    script = program(tmp_path / "bin" / "torchrun", "#!/bin/sh\n" + PIP.format(f'"{home}/python3"'))
    started = subprocess.run([script], capture_output=True, text=True, check=True).stdout
    assert started == f"started {find_launcher(path_of(script.parent)).interpreter}\n"


WRAPPERS = {
    "shell": '#!/bin/sh\nexec saferun "$@"\n',
    "shell, full path": '#!/bin/bash\n# as torchrun\n/opt/bin/saferun run "$@"\n',
    "module": '#!/bin/sh\nexec python3 -m saferun "$@"\n',
    "entry point": "#!/usr/bin/python3\nimport sys\nfrom saferun.__main__ import main\nmain()\n",
}


@pytest.mark.parametrize("text", list(WRAPPERS.values()), ids=list(WRAPPERS))
def test_a_torchrun_that_starts_saferun_is_passed_over(text, tmp_path):
    program(tmp_path / "ours" / "torchrun", text)
    program(tmp_path / "real" / "torchrun", "#!/v/bin/python\n" + TORCHRUN)
    launcher = find_launcher(path_of(tmp_path / "ours", tmp_path / "real"))
    assert launcher.argv == (str(tmp_path / "real" / "torchrun"),)


NOT_WRAPPERS = {
    "environment of that name": "#!/home/u/saferun/bin/python\n" + TORCHRUN,
    "pip's form of it": "#!/bin/sh\n" + PIP.format('"/my saferun env/bin/python"'),
    "a comment": '#!/bin/sh\n# not saferun yet\nexec /opt/torchrun "$@"\n',
    "a path in it": '#!/bin/sh\nexec /opt/saferun/torchrun --x saferun.log "$@"\n',
}


@pytest.mark.parametrize("text", list(NOT_WRAPPERS.values()), ids=list(NOT_WRAPPERS))
def test_a_torchrun_that_only_mentions_saferun_counts(text, tmp_path):
    program(tmp_path / "torchrun", text)
    assert find_launcher(path_of(tmp_path)).argv == (str(tmp_path / "torchrun"),)


@pytest.mark.parametrize("depth", [1, 2], ids=["a symlink", "a symlink to a symlink"])
def test_a_symlink_to_our_own_program_is_passed_over(depth, tmp_path, monkeypatch):
    ours = program(tmp_path / "tool" / "saferun", "#!/v/bin/python\nimport anything\n")
    link = ours
    for number in range(depth):
        following = tmp_path / f"link{number}" / "torchrun"
        following.parent.mkdir()
        following.symlink_to(link)
        link = following
    program(tmp_path / "real" / "torchrun", "#!/v/bin/python\n" + TORCHRUN)
    environ = path_of(link.parent, tmp_path / "real")
    assert find_launcher(environ).argv == (str(link),)  # before we know it for ours
    monkeypatch.setattr(sys, "argv", [str(link)])
    assert find_launcher(environ).argv == (str(tmp_path / "real" / "torchrun"),)


def test_without_one_our_own_torch_is_the_launcher(tmp_path, monkeypatch):
    torch_in(tmp_path / "site", "2.9.0")
    monkeypatch.setattr(sys, "path", ["/nonexistent.zip", str(tmp_path / "site")])
    launcher = find_launcher(path_of(tmp_path))
    assert launcher.argv[:1] == (sys.executable,)
    assert launcher.interpreter == sys.executable


@pytest.mark.parametrize("version", [(3, 10), (3, 11)], ids=["3.10", "3.11"])
def test_our_own_torch_is_started_without_the_working_directory(version, tmp_path, monkeypatch):
    site = tmp_path / "site"
    torch_in(site, "2.9.0")
    package = site / "torch" / "distributed"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "run.py").write_text("import runpy, antigravity_of_ours\n")
    (site / "antigravity_of_ours.py").write_text("print('site')\n")
    here = tmp_path / "here"
    here.mkdir()
    (here / "antigravity_of_ours.py").write_text("print('working directory')\n")
    monkeypatch.setattr(sys, "path", ["", str(site)])
    monkeypatch.setattr(sys, "version_info", version)
    launcher = find_launcher(path_of(tmp_path))
    environ = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(launcher.argv, cwd=here, env=environ, capture_output=True, text=True)
    assert done.stdout == "site\n", done.stderr


def test_a_torch_in_the_working_directory_is_not_ours(tmp_path, monkeypatch):
    torch_in(tmp_path, "2.9.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/nonexistent"])
    with pytest.raises(UnavailableError):
        find_launcher(path_of(tmp_path))


@pytest.mark.usefixtures("no_torch_of_ours")
def test_with_neither_the_error_says_what_where_and_the_fix(tmp_path):
    with pytest.raises(UnavailableError, match="there is no torchrun") as error:
        find_launcher(path_of(tmp_path))
    assert error.value.code == 69
    assert "PATH" in error.value.where
    assert "activate" in error.value.fix


@pytest.mark.usefixtures("no_torch_of_ours")
@pytest.mark.parametrize("path", [None, "", "::"], ids=["no PATH", "empty", "only colons"])
def test_an_odd_path_is_no_crash(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "defpath", "/nonexistent")
    with pytest.raises(UnavailableError):
        find_launcher({} if path is None else {"PATH": path})


def test_python_exec_is_the_workers_interpreter(tmp_path):
    python = program(tmp_path / "python9", "")
    launcher = Launcher(("/v/bin/torchrun",), "/v/bin/python")
    assert worker_interpreter(launcher, {}) == "/v/bin/python"
    assert worker_interpreter(launcher, {"PYTHON_EXEC": "/o/python"}) == "/o/python"
    environ = {"PYTHON_EXEC": "python9", **path_of(tmp_path)}
    assert worker_interpreter(launcher, environ) == str(python)
    assert worker_interpreter(launcher, {"PYTHON_EXEC": "python8", "PATH": ""}) is None


# --- its torch


def environment(root: Path, *, cfg: str | None = None, tag: str = "3.11", exe: str = "") -> Path:
    """Make a fake Python below root; return its bin/torchrun."""
    real = program(root / "bin" / (exe or f"python{tag}"), "")
    if real.name != "python":
        (root / "bin" / "python").symlink_to(real.name)
    if cfg is not None:
        (root / "pyvenv.cfg").write_text(cfg, encoding="utf-8")
    (root / "lib" / f"python{tag}" / "site-packages").mkdir(parents=True)
    return program(root / "bin" / "torchrun", f"#!{root}/bin/python\n{TORCHRUN}")


def version_seen(torchrun: Path, **environ: str) -> str | None:
    environ = {**path_of(torchrun.parent), **environ}
    return torch_version(find_launcher(environ), environ)


LAYOUTS = {
    "conda or pyenv": ({}, "lib/python3.11/site-packages"),
    "Debian": ({}, "lib/python3/dist-packages"),
    "Fedora": ({}, "lib64/python3.11/site-packages"),
    "free-threaded": ({"tag": "3.13t"}, "lib/python3.13t/site-packages"),
    "venv": ({"cfg": "home = /nonexistent/bin\n"}, "lib/python3.11/site-packages"),
    "venv with copies": (
        {"cfg": "home = /nonexistent/bin\nversion = 3.11.7\n", "exe": "python"},
        "lib/python3.11/site-packages",
    ),
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
    (tmp_path / "lib/python3.11/site-packages/torch/version.py").write_text(text, encoding="utf-8")
    seen = version_seen(torchrun)
    assert seen == version if version is None else seen.startswith(version)


def test_behind_a_shim_the_version_is_unknown(tmp_path):
    shim = program(tmp_path / "torchrun", "#!/usr/bin/env bash\nexec pyenv exec torchrun\n")
    assert version_seen(shim) is None


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
    program(
        root / "venv/bin/torchrun",
        f"#!{root}/venv/bin/python\nimport torch\nprint(torch.__version__)\n",
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
    before = config.read_text()
    own = next((real_venv / "venv" / "lib").glob("python*")) / "site-packages" / "torch"
    try:
        if hidden:  # a system-wide look: the user site comes into play
            config.write_text(before.replace("packages = false", "packages = true"))
            own.rename(own.with_name("hidden"))
            environ["PYTHONUSERBASE"] = str(places["user"])
            version = {"venv": "user"}.get(version, version)
        assert imported(real_venv, environ) == f"1.0+{version}"
        assert torch_version(find_launcher(environ), environ) == f"1.0+{version}"
    finally:
        config.write_text(before)
        if hidden:
            own.with_name("hidden").rename(own)


def test_flags_of_the_first_line_close_the_user_site_and_pythonpath(tmp_path):
    torchrun = environment(tmp_path / "root")
    torch_in(tmp_path / "user/lib/python3.11/site-packages", "1+user")
    torch_in(tmp_path / "extra", "1+extra")
    both = {"PYTHONUSERBASE": str(tmp_path / "user"), "PYTHONPATH": str(tmp_path / "extra")}
    assert version_seen(torchrun, PYTHONUSERBASE=both["PYTHONUSERBASE"]) == "1+user"
    assert version_seen(torchrun, **both, PYTHONNOUSERSITE="1") == "1+extra"
    program(torchrun, f"#!{tmp_path}/root/bin/python -E\n{TORCHRUN}")
    assert version_seen(torchrun, **both) == "1+user"
    program(torchrun, f"#!{tmp_path}/root/bin/python -I\n{TORCHRUN}")
    assert version_seen(torchrun, **both) is None


@pytest.mark.parametrize(
    ("system", "version"), [("false", None), ("true", "1+base")], ids=["closed", "open"]
)
def test_a_venv_sees_its_bases_packages_only_where_it_says_so(system, version, tmp_path):
    environment(tmp_path / "base")
    torch_in(tmp_path / "base/lib/python3.11/site-packages", "1+base")
    cfg = f"home = {tmp_path}/base/bin\ninclude-system-site-packages = {system}\n"
    assert version_seen(environment(tmp_path / "venv", cfg=cfg)) == version


def test_this_environments_torchrun_is_read_right():
    torch = pytest.importorskip("torch")
    folder = Path(sys.executable).parent
    if not (folder / "torchrun").exists():
        pytest.skip("no torchrun beside this Python")
    environ = path_of(folder)
    launcher = find_launcher(environ)
    assert torch_version(launcher, environ) == torch.__version__


def test_nothing_heavy_is_imported_to_find_it():
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        "import os\nfrom saferun.plan import torchrun_install as installed\n"
        "try:\n    installed.torch_version(installed.find_launcher(os.environ), os.environ)\n"
        "except installed.UnavailableError:\n    pass\n"
        "print(*sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        env={"PATH": str(Path(sys.executable).parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    heavy = {"subprocess", "json", "hashlib", "importlib.metadata", "torch", "argparse", "shlex"}
    assert not heavy & set(out.stdout.split())


# --- its options

FAKE_TABLE = (
    Option("help", ("-h", "--help"), True, None),
    Option("new_thing", ("--new-thing", "--new_thing"), False, "PET_NEW_THING"),
    Option("flag", ("--flag",), True, "PET_FLAG"),
    Option("plain", ("--plain",), False, None),
)


class FakeTorch:
    """A torch with a parser of its own, reached by PYTHONPATH; counts its imports."""

    def __init__(self, root: Path) -> None:
        self.starts = root / "starts"
        self.cache = root / "cache"
        self.package = root / "site" / "torch" / "distributed"
        self.package.mkdir(parents=True)
        (self.package.parent / "__init__.py").write_text("")
        (self.package / "__init__.py").write_text("")
        (self.package / "argparse_util.py").write_text(source("plan/fake_argparse_util"))
        (self.package / "run.py").write_text(source("plan/fake_torch_run"))
        self.environ = {"PYTHONPATH": str(root / "site"), "PATH": os.defpath}
        self.environ |= {"STARTS": str(self.starts), "MORE": ""}

    def table(self, version: str | None = "9.9", **environ: str):
        launcher = Launcher(("/v/bin/torchrun",), sys.executable)
        return option_table(launcher, version, str(self.cache), {**self.environ, **environ})

    @property
    def started(self) -> int:
        return self.starts.read_text().count("started") if self.starts.exists() else 0

    @property
    def kept(self) -> Path:
        (path,) = self.cache.iterdir()
        return path


@pytest.fixture
def fake_torch(tmp_path: Path) -> FakeTorch:
    return FakeTorch(tmp_path)


def test_the_installed_torchs_table_is_asked_once_and_kept_private(fake_torch):
    assert fake_torch.table() == FAKE_TABLE
    assert fake_torch.table() == FAKE_TABLE
    assert fake_torch.started == 1
    assert stat.S_IMODE(fake_torch.cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(fake_torch.kept.stat().st_mode) == 0o600


def test_another_version_is_asked_anew_and_an_unknown_one_is_not_kept(fake_torch):
    fake_torch.table("9.9")
    fake_torch.table("9.10")
    assert fake_torch.started == 2
    fake_torch.table(None)
    fake_torch.table(None)
    assert fake_torch.started == 4
    assert len(list(fake_torch.cache.iterdir())) == 2


def test_what_the_user_exported_does_not_reach_the_asking(fake_torch):
    assert fake_torch.table(PET_FLAG="not a number", SAFERUN_INJECT="{}") == FAKE_TABLE


BROKEN = {
    "an import fails": "import nonexistent",
    "it exits": "raise SystemExit(0)",
    "it is killed": "os.kill(os.getpid(), 9)",
    "an option with several values": "parser.add_argument('--many', nargs='+')",
}


@pytest.mark.parametrize("more", list(BROKEN.values()), ids=list(BROKEN))
def test_a_torch_that_does_not_answer_gives_no_table_and_leaves_none(more, fake_torch):
    assert fake_torch.table(MORE=more) is None
    assert list(fake_torch.cache.iterdir()) == []


def test_a_hanging_torch_is_ended_with_all_that_it_started(fake_torch, tmp_path, monkeypatch):
    monkeypatch.setattr(torchrun_probe, "OPTION_TABLE_TIMEOUT_S", 3.0)
    pids = tmp_path / "pids"
    more = (
        "import signal, subprocess; child = subprocess.Popen(['sleep', '600']); "
        f"open({str(pids)!r}, 'w').write('%d %d' % (os.getpid(), child.pid)); signal.pause()"
    )
    assert fake_torch.table(MORE=more) is None
    # On a machine so loaded that it was ended before it could write, nothing was started.
    started = pids.read_text().split() if pids.exists() else []
    until(lambda: not any(map(is_running, started)), f"{started} still live", 300)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("interpreter", [None, "/nonexistent/python"], ids=["a shim", "gone"])
def test_without_an_interpreter_there_is_no_table(interpreter, tmp_path):
    assert option_table(Launcher(("torchrun",), interpreter), "1", str(tmp_path), {}) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[1]", '[["a", "b", true, null]]', '[["a", ["x"], true, null]]', "\x00"]
)
def test_a_spoilt_cache_is_asked_anew_and_fixed(text, fake_torch):
    fake_torch.table()
    good = fake_torch.kept.read_text()
    fake_torch.kept.write_text(text)
    assert fake_torch.table() == FAKE_TABLE
    assert fake_torch.started == 2
    assert fake_torch.kept.read_text() == good


def plant_symlink(path: Path, target: Path) -> None:
    path.symlink_to(target)


def plant_others_writable(path: Path, target: Path) -> None:
    path.write_bytes(target.read_bytes())
    path.chmod(0o666)


def plant_fifo(path: Path, target: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("plant", [plant_symlink, plant_others_writable, plant_fifo])
def test_a_planted_file_is_neither_believed_nor_followed(plant, fake_torch, tmp_path):
    fake_torch.table()
    kept = fake_torch.kept
    lie = tmp_path / "lie"
    lie.write_text('[["lie", ["--lie"], true, null]]')
    kept.unlink()
    plant(kept, lie)
    assert fake_torch.table() == FAKE_TABLE
    assert fake_torch.started == 2
    assert lie.read_text() == '[["lie", ["--lie"], true, null]]'
    assert kept.is_file()
    assert not kept.is_symlink()


def test_a_planted_draft_is_not_written_through(fake_torch, tmp_path):
    fake_torch.table()
    kept = fake_torch.kept
    kept.unlink()
    target = tmp_path / "precious"
    target.write_text("precious")
    kept.with_name(f"{kept.name}.{os.getpid()}").symlink_to(target)
    assert fake_torch.table() == FAKE_TABLE
    assert target.read_text() == "precious"


def test_a_folder_that_others_can_write_is_not_used(fake_torch):
    fake_torch.cache.mkdir()
    fake_torch.cache.chmod(0o777)
    assert fake_torch.table() == FAKE_TABLE
    assert list(fake_torch.cache.iterdir()) == []


def test_an_unusable_cache_folder_is_no_matter(fake_torch):
    fake_torch.cache.write_text("a file")
    assert fake_torch.table() == FAKE_TABLE
    launcher = Launcher(("torchrun",), sys.executable)
    assert option_table(launcher, "9.9", None, fake_torch.environ) == FAKE_TABLE


def test_the_real_torch_answers_with_the_table_that_we_carry(tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.__version__.startswith(TABLE_TORCH + "."):
        pytest.skip(f"the table is of torch {TABLE_TORCH}, here is {torch.__version__}")
    launcher = Launcher(("torchrun",), sys.executable)
    assert option_table(launcher, torch.__version__, str(tmp_path)) == OPTIONS
