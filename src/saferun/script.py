"""Pure: a LaunchPlan as shell text.

Every value passes `shlex.quote`: values are data, never shell.
"""

from __future__ import annotations

import shlex

from saferun.model import LaunchPlan
from saferun.plan import OF_ATTEMPT


def exports(plan: LaunchPlan) -> str:
    """Return sorted `export` lines for `eval`: only code, no option set, nothing run.

    What belongs to one attempt under saferun is left out.
    """
    return "".join(
        f"export {name}={shlex.quote(setting.value)}\n"
        for name, setting in sorted(plan.env.items())
        if name not in OF_ATTEMPT
    )
