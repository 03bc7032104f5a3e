"""Load the bootstrap, then hand the name `sitecustomize` to whoever would have had it without us.

Alone in its directory, which saferun puts first on PYTHONPATH: whatever stood here beside it could
be imported by every child. It loads ../bootstrap.py as `_saferun_inject.bootstrap`, by path, so
that the job's Python needs no saferun, and takes its directory off sys.path. Any fault of ours is
one line and the job goes on.
"""


def _bootstrap():
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
    from _saferun_inject import bootstrap

    return bootstrap


def _guarded(step):
    try:
        return step()
    except Exception as error:
        try:
            import sys

            sys.stderr.write("saferun: inject: %s: %s\n" % (type(error).__name__, error))
        except Exception:
            pass
    return None


def _chain():
    # Imports the next sitecustomize under its own name. Where there is none this raises what
    # CPython expects of a missing sitecustomize; what it raises itself passes through unchanged.
    import sys

    mine = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except BaseException:
        if mine is not None:
            sys.modules.setdefault("sitecustomize", mine)
        raise


_loaded = _guarded(_bootstrap)
if _loaded is not None:
    _guarded(_loaded.start)
try:
    _chain()
finally:
    if _loaded is not None:
        _guarded(_loaded.settle)
