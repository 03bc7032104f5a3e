"""Run hooks right after a watched module has been executed, whichever finder found it.

Importlib asks `_bootstrap._find_spec` for the spec of each module that it loads; this module wraps
that function (CPython 3.9 to 3.14 have it). A finder on `sys.meta_path` is not asked if another one
stands before it, and coverage, ddtrace and editable installs add theirs. `sys.meta_path` stays as
it is. No class of importlib.abc is used: importing that costs 15 ms.
"""

import _frozen_importlib  # this is importlib._bootstrap; importlib itself need not be loaded
import _thread
import sys

from . import hidden_frames
from .targets import TARGETS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_finding: "set[tuple[int, str]]" = set()  # (thread, module): a finder may ask for it again


def install(text: str) -> None:
    """Watch the modules of TARGETS from now on; a second call does nothing.

    Args:
        text: the value of SAFERUN_INJECT at the start: a script may clear its environment.

    Raises:
        AttributeError: this Python's importlib has no such function.
    """

    def act(name: str, module: "ModuleType") -> None:
        from . import hook_runner

        hook_runner.run_hooks(text, name, module)

    watch(TARGETS, act)


def watch(names: "Container[str]", act: "Callable[[str, ModuleType], None]") -> None:
    """Call `act` right after a named module was executed; a second call of `watch` does nothing.

    Args:
        names: names of the modules.
        act: function that gets the name and the module.

    Raises:
        AttributeError: this Python's importlib has no such function.
    """
    bootstrap: Any = _frozen_importlib
    original = bootstrap._find_spec
    if getattr(original, "_saferun_watches", False):
        return

    def _find_spec(
        name: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        asked = (_thread.get_ident(), name)
        if name not in names or asked in _finding:
            return original(name, path, target)  # type: ignore[no-any-return]  # importlib's
        _finding.add(asked)
        try:
            spec: ModuleSpec | None = original(name, path, target)
        finally:
            _finding.discard(asked)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = Loader(spec.loader, act)  # type: ignore[assignment]  # any loader
        return spec

    _find_spec._saferun_watches = True  # type: ignore[attr-defined]  # the mark of a second call
    bootstrap._find_spec = _find_spec


class Loader:
    """Execute a module by another finder's loader, which stays in its spec and `__loader__`."""

    def __init__(self, inner: "Any", act: "Callable[[str, ModuleType], None]") -> None:
        self._saferun_inner = inner
        self._saferun_act = act

    def __getattr__(self, name: str) -> "Any":
        if name.startswith("_saferun_"):  # a copy without state so far
            raise AttributeError(name)
        return getattr(self._saferun_inner, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        """Return the other loader's module; None if it leaves that to the import system."""
        create = getattr(self._saferun_inner, "create_module", None)
        module: ModuleType | None = None if create is None else create(spec)
        return module

    def exec_module(self, module: "ModuleType") -> None:
        """Execute the module under its own loader, then run its hooks."""
        spec = module.__spec__
        assert spec is not None
        if spec.loader is self:  # type: ignore[comparison-overlap]  # `watch` put it there
            spec.loader = self._saferun_inner
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._saferun_inner
        try:
            self._saferun_inner.exec_module(module)
        except BaseException as error:
            hidden_frames.hide(error)
            raise
        try:
            self._saferun_act(spec.name, sys.modules.get(spec.name, module))
        except Exception as error:  # our files are gone; the import must not fail
            sys.stderr.write(f"saferun: inject: {type(error).__name__}: {error}\n")
