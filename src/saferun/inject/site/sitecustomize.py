"""Load the bootstrap, then give the name `sitecustomize` to the module that it belongs to.

This file is alone in its directory, which saferun puts first on PYTHONPATH: every child could
import a file beside it. It loads ../bootstrap.py as `_saferun_inject.bootstrap`, by path, so that
the job's Python needs no saferun, and takes its directory off sys.path. An error of ours is one
line, and the job goes on. Pythons as old as 2.7 read this file: no annotations.
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
    # The job's sys.path is what it would be without us; the environment carries us to children.
    sys.path[:] = [entry for entry in sys.path if entry != here]
    if not os.environ.get("SAFERUN_INJECT") or "_saferun_inject" in sys.modules:
        return None
    if sys.version_info < (3, 9):  # a helper of the job's in an older Python, 2.7 included
        return None
    package = type(sys)("_saferun_inject")
    package.__path__ = [os.path.dirname(here)]
    sys.modules["_saferun_inject"] = package
    from _saferun_inject import bootstrap  # type: ignore[import-not-found]  # loaded from its place

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
    # Imports the next sitecustomize under its own name. Where there is none this raises what
    # CPython expects of a missing sitecustomize; what it raises itself passes through unchanged.
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
