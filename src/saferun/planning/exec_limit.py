"""Pure: whether a plan's variables make the environment too large for the kernel.

Source: bprm_stack_limits and MAX_ARG_STRLEN in Linux' fs/exec.c and binfmts.h, and execve(2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from saferun.model import LaunchPlan

ALWAYS_BYTES = 128 << 10  # allowed whatever the stack's limit is
_MOST_BYTES = 6 << 20
_STRING_BYTES = 128 << 10  # most for one argument or variable, with pages of 4 KiB
_POINTER_BYTES = 8
RANK_BYTES = 4 << 10  # for some twenty variables that torchrun adds in a rank


def size(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Return the bytes that the kernel counts for a program's arguments and environment."""
    strings = sum(map(_bytes, argv)) + sum(_bytes(n) + _bytes(v) for n, v in env.items())
    return strings + _bytes(argv[0]) + _POINTER_BYTES * (len(argv) + len(env))


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape")) + 1  # the final NUL, or the "="


def limit(stack_bytes: int | None) -> int:
    """Return how many bytes a program may be given.

    Args:
        stack_bytes: the soft limit of the stack; None for none.
    """
    quarter = _MOST_BYTES if stack_bytes is None else stack_bytes // 4
    return max(ALWAYS_BYTES, min(_MOST_BYTES, quarter))


def excess(plan: LaunchPlan, environ: Mapping[str, str], most: int) -> str:
    """Return what is too large because of the plan's variables, for people; "" if all fits.

    Args:
        plan: the plan of the attempt.
        environ: the user's environment, which fits: saferun was started with it.
        most: bytes that a program may be given (`limit`).
    """
    env = plan.environment(environ)
    for name in plan.env:
        if _bytes(name) + _bytes(env[name]) > _STRING_BYTES:
            count = _bytes(env[name]) - 1
            return f"{name} would have {count} bytes, and the kernel passes {_STRING_BYTES} of one"
    whole = size(plan.command, env) + RANK_BYTES
    if whole <= most or size(plan.command, environ) > most:
        return ""
    ours = size(plan.command, env) - size(plan.command, environ)
    name = max(environ, key=lambda one: _bytes(environ[one]))
    return (
        f"a rank's command line and environment would have {whole} bytes, {ours} of them by "
        f"variables that saferun sets, and the kernel passes {most}; the largest of yours is "
        f"{name} with {_bytes(environ[name]) - 1}"
    )
