"""Our own files, kept in memory from an attempt's start: they may vanish or change while it lives.

An upgrade of the package does that, or the removed bundle of a generated script. The diagnosis, the
decision and the next attempts must not depend on them then. While the keeper starts the job their
texts are read (`hold`, some 10 ms: a Python needs longer to its first line); half a second later
what an end may need is imported (`keep`). The ranks of later attempts find the hooks in the run's
directory then.
"""

from __future__ import annotations

import base64
import importlib
import marshal
import os
import sys
import zlib
from _frozen_importlib import ModuleSpec  # importlib.machinery's, without its import
from collections.abc import Iterator, Sequence
from types import ModuleType

from saferun.diagnosis import signatures
from saferun.knowledge import loader
from saferun.supervise.ready import keeper_pool
from saferun.system import paths, trust
from saferun.system.paths import PACKAGE

_IMPORTED = ("supervise", "gpu", "journal", "planning", "diagnosis", "knowledge", "system")
_KEEPER, _HOOKS = "keeper", "inject"
_ROOMS = (*_IMPORTED, "profile", _KEEPER, _HOOKS)
# What it starts reads its program from the disk, in a Python that may not be ours.
_NOT_KEPT = ("warm_agent.py",)
# What other processes execute; the rest is needed here alone, where it may be imported already.
_EXECUTED = ("", _KEEPER, _HOOKS, "gpu")
_HOOKS_PLACE = "hooks"  # a folder of the run's directory

# The program of a keeper whose sources come with its command line.
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


class OwnFiles:
    """The texts of our files as they were; they are imported from here where they are gone."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}  # path -> text
        self._stamps: dict[str, tuple[int, int, int]] = {}

    def hold(self) -> bool:
        """Read them; return False if they have been read before.

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

    def modules(self, rooms: Sequence[str]) -> list[str]:
        """Return the names of the modules of some rooms."""
        return sorted(_module(path) for path in self._texts if _room(path) in rooms)

    def keeper_prologue(self) -> str:
        """Return code that lets a keeper import what was held; "" where the files are the same."""
        if self._is_unchanged(_KEEPER):
            return ""
        found = {
            _module(path): (text, path.endswith("__init__.py"))
            for path, text in self._texts.items()
            if _room(path) in ("", _KEEPER) and os.path.basename(path) not in _NOT_KEPT
        }

        packed = base64.b64encode(zlib.compress(marshal.dumps(found))).decode()
        return _KEPT.format(packed=packed)

    def hooks_site(self, site: str, run_path: str | None) -> str:
        """Return the directory of sitecustomize.py for an attempt that begins now.

        Args:
            site: where it was.
            run_path: the run's directory, where the hooks are written if they are gone or changed.
        """
        if run_path is None or not os.path.isdir(run_path) or self._is_unchanged(_HOOKS):
            return site
        if trust.can_be_replaced(run_path):  # the ranks would run what is put there
            return site
        place = os.path.join(run_path, _HOOKS_PLACE)
        paths.private_dir(place)
        for path, text in self._texts.items():
            if _room(path) == _HOOKS:
                target = os.path.join(place, os.path.relpath(path, PACKAGE))
                paths.write_private(target, text.encode())
        own = os.path.join(place, os.path.relpath(site, PACKAGE))
        return own if os.path.exists(os.path.join(own, "sitecustomize.py")) else site

    def _is_unchanged(self, room: str) -> bool:
        stamps = [(path, stamp) for path, stamp in self._stamps.items() if _room(path) == room]
        try:
            return all(_stamp(os.stat(path)) == stamp for path, stamp in stamps)
        except OSError:
            return False

    # As a finder and loader of modules, after all others.

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of ours, which no other finder has found.

        Args:
            name: the module's.
            path: what every finder gets, not used; so is `target`.
            target: see `path`.
        """
        stem = os.path.join(os.path.dirname(PACKAGE), *name.split("."))
        for file in (f"{stem}.py", os.path.join(stem, "__init__.py")):
            if file in self._texts:
                is_package = file.endswith("__init__.py")
                spec = ModuleSpec(name, self, origin=file, is_package=is_package)  # type: ignore[arg-type]  # no base class: importlib.abc is slow
                spec.has_location = True  # it has __file__
                return spec
        return None

    def get_data(self, path: str) -> bytes:
        """Return the text of one of our files, for a module that runs another one as a program."""
        return self._texts[path].encode()

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system."""

    def exec_module(self, module: ModuleType) -> None:
        """Execute what was held."""
        file = module.__spec__.origin if module.__spec__ else None
        assert file is not None, "find_spec has set it"
        exec(compile(self._texts[file], file, "exec"), vars(module))  # noqa: S102 - our own code


_files = OwnFiles()
hooks_site = _files.hooks_site


def hold() -> None:
    """Read our files, once.

    Raises:
        OSError: something is gone already.
    """
    if _files.hold():
        keeper_pool.prologue = _files.keeper_prologue
        loader.hold()


def keep() -> None:
    """Import what any end of an attempt may need, and parse the data for it."""
    loader.keep()
    for name in _files.modules(_IMPORTED):
        if name not in sys.modules:
            try:
                importlib.import_module(name)
            except ImportError:  # it needs a library that only commands need
                continue

    signatures.keep()


def _paths() -> Iterator[str]:
    """Return the paths of our files."""
    yield os.path.join(PACKAGE, "__init__.py")
    for room in _ROOMS:
        for folder, folders, files in os.walk(os.path.join(PACKAGE, room)):
            folders[:] = [name for name in folders if name != "__pycache__"]
            yield from (os.path.join(folder, name) for name in files if name.endswith(".py"))


def _module(path: str) -> str:
    """Return the name of a file's module."""
    stem = os.path.relpath(path, os.path.dirname(PACKAGE)).removesuffix(".py")
    return stem.removesuffix("/__init__").replace("/", ".")


def _room(path: str) -> str:
    """Return the room of a file; "" for one above all rooms."""
    return os.path.relpath(path, PACKAGE).rpartition("/")[0].partition("/")[0]


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns
