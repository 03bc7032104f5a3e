"""Keep our own files in memory from an attempt's start: they may vanish or change meanwhile.

An upgrade of the package changes them, and the bundle of a generated script may be removed. The
diagnosis, the decision and the next attempts must not depend on them then. While the keeper starts
the job, `hold` reads their texts (some 10 ms: a Python needs longer to reach its first line). Half
a second later `look` imports what the end of an attempt may need. If the files have changed, the
ranks of later attempts find the hooks in the run's directory.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import marshal
import os
import sys
import zlib
from _frozen_importlib import ModuleSpec  # that of importlib.machinery, without its slow import
from collections.abc import Iterator, Sequence
from types import ModuleType

from saferun.diagnosis import signatures
from saferun.knowledge import loader
from saferun.supervise.beside import NEVER_S, Beside
from saferun.supervise.ready import keeper_pool
from saferun.system import paths, trust
from saferun.system.paths import PACKAGE

_IMPORTED = ("supervise", "gpu", "journal", "planning", "diagnosis", "knowledge", "system")
_KEEPER, _HOOKS = ("", "base", "keeper"), ("base", "inject")  # the rooms that each of them needs
_ROOMS = (*_IMPORTED, "profile", "keeper", "inject", "base")
# Not passed to a keeper: its child reads its program from disk, in a Python that may not be ours.
_NOT_KEPT = ("warm_agent.py",)
# Rooms that other processes execute. The other rooms are needed only here, and may be imported
# already.
_EXECUTED = (*_KEEPER, *_HOOKS, "gpu")
_HOOKS_PLACE = "hooks"  # a folder of the run's directory

# The program of a keeper whose sources are in its command line.
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


class OwnFiles(Beside):
    """The original texts of our files; modules are imported from them if the files are gone."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}  # path -> text
        self._stamps: dict[str, tuple[int, int, int]] = {}

    def hold(self) -> bool:
        """Read the texts; return False if they were read before.

        Raises:
            OSError: one of them cannot be read.
        """
        if self._texts:
            return False
        texts, stamps = {}, {}
        for path in _paths():
            if _module(path) in sys.modules and _room(path) not in _EXECUTED:
                continue
            with open(path, encoding="utf-8") as file:
                status = os.fstat(file.fileno())
                texts[path], stamps[path] = file.read(), _stamp(status)
        self._texts, self._stamps = texts, stamps
        sys.meta_path.append(self)
        return True

    def look(self) -> float:
        """Import what any end of an attempt may need, and parse the data for it."""
        loader.keep()
        for name in sorted(_module(path) for path in self._texts if _room(path) in _IMPORTED):
            with contextlib.suppress(ImportError):  # it needs a library that only commands have
                importlib.import_module(name)
        signatures.keep()
        return NEVER_S

    def keeper_prologue(self) -> str:
        """Return code by which a keeper imports the held texts; "" if the files are unchanged."""
        if self._is_unchanged(_KEEPER):
            return ""
        found = {
            _module(path): (text, path.endswith("__init__.py"))
            for path, text in self._texts.items()
            if _room(path) in _KEEPER and os.path.basename(path) not in _NOT_KEPT
        }

        packed = base64.b64encode(zlib.compress(marshal.dumps(found))).decode()
        return _KEPT.format(packed=packed)

    def hooks_site(self, site: str, run_path: str | None) -> str:
        """Return the directory of sitecustomize.py for an attempt that begins now.

        Args:
            site: its original directory.
            run_path: the run's directory, to which the hooks are written if they are gone or
                changed.
        """
        if run_path is None or not os.path.isdir(run_path) or self._is_unchanged(_HOOKS):
            return site
        if trust.can_be_replaced(run_path):  # the ranks would run files that others put there
            return site
        place = os.path.join(run_path, _HOOKS_PLACE)
        paths.private_dir(place)
        for path, text in self._texts.items():
            if _room(path) in _HOOKS:
                target = os.path.join(place, os.path.relpath(path, PACKAGE))
                paths.write_private(target, text.encode())
        own = os.path.join(place, os.path.relpath(site, PACKAGE))
        return own if os.path.exists(os.path.join(own, "sitecustomize.py")) else site

    def _is_unchanged(self, rooms: Sequence[str]) -> bool:
        stamps = [(path, stamp) for path, stamp in self._stamps.items() if _room(path) in rooms]
        try:
            return all(_stamp(os.stat(path)) == stamp for path, stamp in stamps)
        except OSError:
            return False

    # This object is also a finder and loader of modules, after all others.

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of our modules that no other finder has found.

        Args:
            name: the module's name.
            path: part of a finder's interface; not used.
            target: part of a finder's interface; not used.
        """
        stem = os.path.join(os.path.dirname(PACKAGE), *name.split("."))
        for file in (f"{stem}.py", os.path.join(stem, "__init__.py")):
            if file in self._texts:
                is_package = file.endswith("__init__.py")
                spec = ModuleSpec(name, self, origin=file, is_package=is_package)  # type: ignore[arg-type]  # no base class: importlib.abc is slow
                spec.has_location = True  # the module gets __file__
                return spec
        return None

    def get_data(self, path: str) -> bytes:
        """Return the text of one of our files, for a module that runs another one as a program."""
        return self._texts[path].encode()

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system create the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Execute the text that was held."""
        file = module.__spec__.origin if module.__spec__ else None
        assert file is not None, "find_spec has set it"
        exec(compile(self._texts[file], file, "exec"), vars(module))  # noqa: S102 - our own code


files = OwnFiles()


def hold() -> None:
    """Read our files, once.

    Raises:
        OSError: a file is already gone.
    """
    if files.hold():
        keeper_pool.prologue = files.keeper_prologue
        loader.hold()


def _paths() -> Iterator[str]:
    """Return the paths of our files."""
    yield os.path.join(PACKAGE, "__init__.py")
    for room in _ROOMS:
        for folder, folders, files in os.walk(os.path.join(PACKAGE, room)):
            folders[:] = [name for name in folders if name != "__pycache__"]
            ours = (name for name in files if name.endswith((".py", ".json")))
            yield from (os.path.join(folder, name) for name in ours)


def _module(path: str) -> str:
    """Return the name of a file's module."""
    stem = os.path.relpath(path, os.path.dirname(PACKAGE)).removesuffix(".py")
    return stem.removesuffix("/__init__").replace("/", ".")


def _room(path: str) -> str:
    """Return the room of a file; "" for one above all rooms."""
    return os.path.relpath(path, PACKAGE).rpartition("/")[0].partition("/")[0]


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns
