"""Pure: a LaunchPlan as shell text.

Every value passes `shlex.quote`: values are data, never shell.
"""

from __future__ import annotations

import shlex

from saferun.model import LaunchPlan


def exports(plan: LaunchPlan) -> str:
    """Return sorted `export` lines for `eval`: only code, no option set, nothing run."""
    return "".join(
        f"export {name}={shlex.quote(setting.value)}\n"
        for name, setting in sorted(plan.env.items())
    )
