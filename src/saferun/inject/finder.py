"""A finder that runs hooks right after a watched module has been executed.

It holds no class of importlib.abc: importing that costs 15 ms.
"""

import sys

from .targets import TARGETS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class Finder:
    """Finds a watched module as the other finders find it, and puts a Loader around its loader."""

    def __init__(self, text: str) -> None:
        """Take SAFERUN_INJECT, as it was at the start: a script may clear its environment."""
        self._text = text

    def find_spec(
        self,
        name: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        """Return the spec that the other finders find; None for a module that is not watched.

        Args:
            name: the full name of the module.
            path: the package's `__path__`; None for a top-level module.
            target: the module that is reloaded, if any.

        Returns:
            Their spec, with our loader around its loader where that can execute modules.
        """
        if name not in TARGETS:
            return None
        for finder in list(sys.meta_path):
            if finder is self:
                continue
            find = getattr(finder, "find_spec", None)
            if find is None:  # it has find_module only: the import system calls it itself
                return None
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = Loader(spec.loader, self._text)  # type: ignore[assignment]  # any loader
                return spec
        return None


class Loader:
    """Another finder's loader; the module's `__loader__` and spec keep that one."""

    def __init__(self, inner: "Any", text: str) -> None:
        self._saferun_inner = inner
        self._saferun_text = text

    def __getattr__(self, name: str) -> "Any":
        if name.startswith("_saferun_"):  # a copy that has no state yet
            raise AttributeError(name)
        return getattr(self._saferun_inner, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        """Return what the other loader makes, None where it leaves that to the import system."""
        create = getattr(self._saferun_inner, "create_module", None)
        module: ModuleType | None = None if create is None else create(spec)
        return module

    def exec_module(self, module: "ModuleType") -> None:
        """Execute the module under its own loader, then run its hooks."""
        spec = module.__spec__
        assert spec is not None
        if spec.loader is self:  # type: ignore[comparison-overlap]  # as set above
            spec.loader = self._saferun_inner
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._saferun_inner
        self._saferun_inner.exec_module(module)
        try:
            from . import context

            context.run_hooks(self._saferun_text, spec.name, sys.modules.get(spec.name, module))
        except Exception as error:  # our files are gone: the import of a module must not fail
            sys.stderr.write(f"saferun: inject: {type(error).__name__}: {error}\n")
