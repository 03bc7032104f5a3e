"""What tests of several modules share."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from typing import Any

import helpers
import pytest
import rights
import sandbox

# A shell ignores two of these for its background jobs, and nohup a third. What tests start would
# inherit that.
for _name in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(_name) is signal.SIG_IGN:
        own = signal.default_int_handler if _name == signal.SIGINT else signal.SIG_DFL
        signal.signal(_name, own)

os.umask(0o022)  # tests ask for modes of files


def _place_for_temporary_files() -> str:
    """Make a directory in which programs can be executed, and whose name nobody may rely on."""
    for place in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", str(ROOT)):
        if os.path.isdir(place) and not os.statvfs(place).f_flag & os.ST_NOEXEC:
            break
    letter = "ä" if sys.getfilesystemencoding() == "utf-8" else "ae"  # a C locale's knows no others
    found = os.path.join(place, f"a saferun torchrun r{letter}ume {os.geteuid()}")
    os.makedirs(found, 0o755, exist_ok=True)
    return found


ROOT = pathlib.Path(__file__).resolve().parent.parent
tempfile.tempdir = TEMPORARY = _place_for_temporary_files()  # what tests start has TMPDIR
_environ = {
    **sandbox.clean(os.environ),
    "PYTEST_DEBUG_TEMPROOT": TEMPORARY,  # tmp_path lies below it
    # Else one in /tmp, maybe another user's.
    "TORCHINDUCTOR_CACHE_DIR": sandbox.unquoted(pathlib.Path(TEMPORARY, "inductor")),
    "OMP_NUM_THREADS": "1",  # what tests start: torch's threads fight for the cores
}
os.environ.clear()
os.environ.update(_environ)
sys.dont_write_bytecode = False  # nor do Pythons compile what is imported anew


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files first that need interpreters with torch: one worker starts them, and no other.

    Each worker of pytest-xdist has a part of the tests in their order.
    """
    forked = {item.path for item in items if "forks" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path not in forked)


def pytest_unconfigure() -> None:
    sandbox.LINKS().cleanup()  # a worker of pytest-xdist calls no exit functions


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was skipped in one line, the commonest reason first."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    counted = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
    terminalreporter.write_line(f"skipped {len(skipped)}" + f" ({counted})" * bool(counted))


def _leave(process: subprocess.Popen[Any], kind: object, *rest: object) -> None:
    """End a child whose block an exception leaves: who failed would wait for it for ever."""
    if kind is not None:
        process.kill()
    _popen_exit(process, kind, *rest)


_popen_exit = subprocess.Popen.__exit__
subprocess.Popen.__exit__ = _leave


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a right that is missing here."""
    helpers.watched.clear()
    for right in (right for mark in item.iter_markers("rights") for right in mark.args):
        if why := rights.missing(right):
            pytest.skip(why)


@pytest.fixture(scope="session")
def corpus() -> pathlib.Path:
    """The directory of real command lines and failures; it is not part of the project."""
    place = pathlib.Path(os.environ.get("SAFERUN_CORPUS") or ROOT.parent / "shared" / "corpus")
    if not place.is_dir():
        pytest.skip(f"no corpus at {place} (SAFERUN_CORPUS)")
    return place


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A user's fresh home."""
    place = tmp_path / "home"
    place.mkdir()
    monkeypatch.setenv("HOME", str(place))
    return place
