"""What an attempt's end needs of our own files, kept in memory from soon after a start.

They may vanish or change while a run lives: an upgrade of the package, the removed bundle of a
generated script. The diagnosis, the decision and the next attempt must not depend on them then.
"""

from __future__ import annotations

import base64
import importlib
import marshal
import os
import sys
import zlib
from collections.abc import Iterator, Mapping

from saferun.knowledge import loader
from saferun.supervise import keeper_pool
from saferun.system.paths import PACKAGE

_ROOMS = ("supervise", "gpu", "journal", "plan", "diagnosis", "knowledge", "system")
# Its program is read from the disk by a Python that may not be ours (keeper/warm_agent.py).
_NOT_KEPT = ("warm_agent.py", "warm_agent_main.py")

# The sources come with the command line.
_KEPT = """
import base64, marshal, sys, zlib
from importlib.machinery import ModuleSpec
kept = marshal.loads(zlib.decompress(base64.b64decode({packed!r})))
class Kept:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=kept[name][1]) if name in kept else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(compile(kept[module.__name__][0], module.__name__, "exec"), vars(module))
sys.meta_path.insert(0, Kept())
"""


class KeeperFiles:
    """The files that a keeper runs, as they were when they were kept."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, bool]] = {}  # module -> source, is a package
        self._stamps: dict[str, tuple[int, int, int]] = {}

    def keep(self) -> bool:
        """Read them; return False if they have been read before.

        Raises:
            OSError: one of them cannot be read.
        """
        if self._found:
            return False
        found, stamps = {}, {}
        for name, path in _keeper_modules():
            with open(path, encoding="utf-8") as file:
                found[name] = file.read(), path.endswith("__init__.py")
            stamps[path] = _stamp(path)
        self._found, self._stamps = found, stamps
        return True

    def prologue(self) -> str:
        """Return code that lets a Python import what was kept; "" where the files are the same."""
        if self._is_unchanged():
            return ""
        packed = base64.b64encode(zlib.compress(marshal.dumps(self._found))).decode()
        return _KEPT.format(packed=packed)

    def _is_unchanged(self) -> bool:
        try:
            return all(_stamp(path) == stamp for path, stamp in self._stamps.items())
        except OSError:
            return False


_keeper_files = KeeperFiles()


def keep(environ: Mapping[str, str]) -> None:
    """Import what any end of an attempt may need, and read the data and the keeper's files, once.

    Args:
        environ: names the user's cache directory.

    Raises:
        OSError: something is gone already.
    """
    if not _keeper_files.keep():
        return
    keeper_pool.prologue = _keeper_files.prologue
    loader.keep(environ)
    for room in _ROOMS:
        for name, _ in _modules(room):
            if name not in sys.modules:
                try:
                    importlib.import_module(name)
                except ImportError:  # of a library that only commands need
                    continue


def _modules(room: str) -> Iterator[tuple[str, str]]:
    folder = os.path.join(PACKAGE, room)
    for file in sorted(os.listdir(folder)):
        if file.endswith(".py"):
            stem = file.removesuffix(".py")
            name = f"saferun.{room}" + ("" if stem == "__init__" else f".{stem}")
            yield name, os.path.join(folder, file)


def _keeper_modules() -> Iterator[tuple[str, str]]:
    yield "saferun", os.path.join(PACKAGE, "__init__.py")
    yield "saferun.named_tuple", os.path.join(PACKAGE, "named_tuple.py")
    for name, path in _modules("keeper"):
        if os.path.basename(path) not in _NOT_KEPT:
            yield name, path


def _stamp(path: str) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns
