"""Load the bootstrap, then give the name `sitecustomize` back to its proper module.

This file is alone in its directory, which saferun puts first in PYTHONPATH: every child could
import a file beside it. It loads ../bootstrap.py as `_saferun.inject.bootstrap`, by path: the job's
Python needs no saferun, and `inject` finds the room `base` as it does in the package. It removes
its directory from sys.path. An error in saferun becomes one line, and the job continues. Pythons
as old as 2.7 read this file, so it has no annotations.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional, TypeVar  # noqa: F401 (in comments for Python 2.7)

    Result = TypeVar("Result")


def _bootstrap():
    # type: () -> Any
    # Returns the bootstrap, loaded once for each process; None where SAFERUN_INJECT is not set.
    import os
    import sys

    here = os.path.dirname(os.path.abspath(__file__))
    # The job's sys.path is as without us; the environment brings us into children.
    sys.path[:] = [entry for entry in sys.path if entry != here]
    if not os.environ.get("SAFERUN_INJECT") or "_saferun" in sys.modules:
        return None
    if sys.version_info < (3, 9):  # a helper of the job with an older Python, even 2.7
        return None
    package = type(sys)("_saferun")
    package.__path__ = [os.path.dirname(os.path.dirname(here))]
    sys.modules["_saferun"] = package
    from _saferun.inject import bootstrap  # type: ignore[import-not-found]  # loaded from its place

    return bootstrap


def _guarded(step):
    # type: (Callable[[], Result]) -> Optional[Result]
    try:
        return step()
    except Exception as error:
        try:
            import sys

            sys.stderr.write("saferun: inject: %s: %s\n" % (type(error).__name__, error))
        except Exception:
            pass
    return None


def _import_next():
    # type: () -> None
    # Imports the next sitecustomize under its own name. If there is none, this raises the error
    # that CPython expects of a missing sitecustomize; the module's own errors pass unchanged.
    import sys

    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # loaded from its place # noqa: F401 (in comments for Python 2.7)
    except BaseException:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)
        raise


_loaded = _guarded(_bootstrap)
if _loaded is not None:
    _guarded(_loaded.start)
try:
    _import_next()
finally:
    if _loaded is not None:
        _guarded(_loaded.settle)
