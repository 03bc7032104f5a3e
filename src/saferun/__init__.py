"""saferun: the command that stands where torchrun stands, and starts the job again after a crash.

Python programs use `saferun.run`, `saferun.plan` and `saferun.diagnose` (docs/api.md). They are
loaded when they are first used: a launch imports this package, too.
"""

__version__ = "1.0.0"
__all__ = [
    "Attempt",
    "Diagnosis",
    "LaunchPlan",
    "ProfileError",
    "RunError",
    "RunResult",
    "SaferunError",
    "UnavailableError",
    "UsageError",
    "diagnose",
    "plan",
    "run",
]

TYPE_CHECKING = False
if TYPE_CHECKING:  # a launch imports the package, and needs none of them: see `__getattr__`
    from saferun.api import Attempt, RunError, RunResult, diagnose, plan, run
    from saferun.diagnosis.diagnosis import Diagnosis
    from saferun.errors import ProfileError, SaferunError, UnavailableError, UsageError
    from saferun.model import LaunchPlan


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'saferun' has no attribute {name!r}")
    from saferun import api, errors

    return getattr(errors if hasattr(errors, name) else api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
