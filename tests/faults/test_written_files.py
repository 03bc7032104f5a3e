"""Every file that a run writes, with its owner and mode, for eight starters.

The job lists them while it runs, twice, live and as a bash script, and this process afterwards. A
user other than root needs a Python that he can start.
"""

import contextlib
import os
import re
import stat
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from cases import slow
from disks import small_disk
from helpers import ROOT
from repo import source
from rights import OTHER, needs
from runs import LIMIT_S, program, small_torchrun
from sandbox import captured, executable, nvidia_smi, python_program
from users import open_place

LOCKS = "/run/lock/saferun"
Entry = tuple[int, int, str]  # mode, owner and path
PYTHON = f"/usr/bin/python3.{sys.version_info[1]}"


class Starter(NamedTuple):
    """Who starts saferun, and where."""

    uid: int = OTHER
    umask: int = 0o022
    home_uid: int = OTHER
    home_mode: int = 0o755
    mount: str = ""  # how HOME is mounted: "full", "read-only"


STARTERS = {
    "umask 000": Starter(umask=0),
    "umask 077": Starter(umask=0o077),
    "a group's HOME": Starter(umask=0o002, home_mode=0o2775),
    "root": Starter(uid=0, home_uid=0),
    "root with a user's HOME": Starter(uid=0),
    "a user with root's HOME": Starter(home_uid=0),
    "full": Starter(mount="full"),
    "read-only": Starter(mount="read-only"),
}
DIRECTORY, FILE = stat.S_IFDIR, stat.S_IFREG
# What lies where: a pattern of the path, type and mode; "umask" are modes that follow it.
TABLE = (
    (r"home/\.(cache|config|local)(/state)?", DIRECTORY, "umask 755"),
    (r"home/\.(cache|local/state)/saferun(/.*)?", DIRECTORY, "700"),
    (r"home/\.(cache|local/state)/saferun/.*", FILE, "600"),
    (r"tmp/saferun-\d+(/.*)?", DIRECTORY, "700"),
    (r"tmp/saferun-\d+/.*", FILE, "600"),
    (r"tmp/saferun-kit\.\w+", DIRECTORY, "700"),  # the bundle of a script that runs
    (r"tmp/saferun-kit\.\w+/.*/__pycache__", DIRECTORY, "umask 777"),  # Python's own
    (r"tmp/saferun-kit\.\w+/.*", DIRECTORY, "700"),
    (r"tmp/saferun-kit\.\w+/.*", FILE, "600"),
    (r"work/run\.sh", FILE, "umask 777"),
    (rf"{LOCKS}/.*\.(lock|slot0)", FILE, "666"),
)


@pytest.fixture
def number() -> Iterator[str]:
    """Return what stands in the name of a GPU that no other test has."""
    found = uuid.uuid4().hex
    yield found
    for path in Path(LOCKS).glob(f"*{found}*"):
        path.unlink()


@pytest.fixture
def place() -> Iterator[Path]:
    """Return a directory that every user may enter, with what a run needs."""
    with open_place() as found:
        yield Path(found)


@contextlib.contextmanager
def home(place: Path, starter: Starter) -> Iterator[Path]:
    """Make the HOME of who starts it."""
    path = place / "home"
    with small_disk(path, "64k") if starter.mount else contextlib.nullcontext():
        path.mkdir(exist_ok=True)
        os.chown(path, starter.home_uid, starter.home_uid)
        path.chmod(starter.home_mode)
        if starter.mount == "full":
            with contextlib.suppress(OSError), (path / "other").open("wb") as file:
                file.write(bytes(1 << 20))
        if starter.mount == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", path], check=True)
        yield path


def listed(*places: Path | str) -> Iterator[Entry]:
    for path in (path for start in places for path in Path(start).rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # another run's lock
            status = path.lstat()
            yield status.st_mode, status.st_uid, str(path)


def wrong(entry: Entry, place: Path, starter: Starter) -> str:
    """Return what is wrong with a file that was listed; "" where it is as the table says."""
    mode, uid, path = entry
    name = os.path.relpath(path, place) if Path(path).is_relative_to(place) else path
    for pattern, kind, allowed in TABLE:
        if re.fullmatch(pattern, name) and stat.S_IFMT(mode) == kind:
            umask = starter.umask if allowed.startswith("umask") else 0
            expected = int(allowed.split()[-1], 8) & ~umask
            is_right = stat.S_IMODE(mode) & ~stat.S_ISGID == expected and uid == starter.uid
            return "" if is_right else f"{mode:o} {uid} {name}, not {expected:o} {starter.uid}"
    return f"{mode:o} {uid} {name} is not in the table"


def prepared(place: Path, number: str, starter: Starter) -> dict[str, str]:
    """Make what a run needs beside HOME; return its environment."""
    for name in ("work", "tmp"):
        (place / name).mkdir()
        os.chown(place / name, starter.uid, starter.uid)
    environ = small_torchrun(place)
    torchrun = python_program(source("faults/small_torchrun"), python=PYTHON)
    executable(place / "bin" / "torchrun", torchrun)
    nvidia_smi(place / "bin", f"echo 'GPU 0: NVIDIA Fake (UUID: GPU-0000-{number})'")
    python_path = [ROOT / "src", sysconfig.get_path("purelib")]
    return environ | {
        "PATH": f"{place / 'bin'}:/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join(map(str, python_path)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(place / "home"),
        "TMPDIR": str(place / "tmp"),
        "SMALL_TORCHRUN_REPORTS": "1",
    }


def seen_by_the_jobs(place: Path, starter: Starter, environ: dict[str, str]) -> set[Entry]:
    """Run the job under saferun and as a script; return what lay there while it ran."""

    def call(*argv: str) -> None:
        done = captured(
            *argv,
            env=environ,
            cwd=place / "work",
            user=starter.uid,
            group=starter.uid,
            extra_groups=[],
            umask=starter.umask,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr

    saferun, list_file = (PYTHON, "-m", "saferun"), place / "work" / "list"
    job = ("--nproc-per-node=1", program("list_files"), str(list_file), str(place), LOCKS)
    call(*saferun, "--profile=cuda", *job)
    call(*saferun, "gen-shell", "--profile=cuda", "-o", "run.sh", "--", *job)
    call("bash", "run.sh")
    text = list_file.read_text(encoding="utf-8")
    assert text.count(f"{place}/work\n") == 4  # attempts that listed
    list_file.unlink()
    lines = [line.split(" ", 2) for line in text.splitlines()]
    return {(int(mode, 8), int(uid), path) for mode, uid, path in lines if path != str(list_file)}


@needs("become others", "mount")
@pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason=f"there is no {PYTHON}")
@pytest.mark.parametrize("starter", [*list(STARTERS)[:1], *slow(*list(STARTERS)[1:])])
def test_each_file_that_a_run_writes_has_its_owner_and_mode(place, number, starter):
    starter = STARTERS[starter]
    with home(place, starter):
        environ = prepared(place, number, starter)
        before = set(listed(place))
        during = seen_by_the_jobs(place, starter, environ)
        after = set(listed(place, LOCKS)) - before
        ours = [e for e in during | after if Path(e[2]).is_relative_to(place) or number in e[2]]
        own = {path for _, _, path in before}
        assert (
            "\n".join(w for e in ours if e[2] not in own and (w := wrong(e, place, starter))) == ""
        )
        left = [path for _, _, path in after if "/tmp/saferun-kit." in path or "holder." in path]
        assert [path for path in left if number in path or str(place) in path] == []
