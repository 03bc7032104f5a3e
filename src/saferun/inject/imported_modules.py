"""List what a rank has imported when it joins its group, and a job's first Python when it ends.

The next start of the script imports these modules of installed packages ahead, in this order, and
heeds the environment variables that the program has assigned so far (start/imports.py). A search
lists them after its first trial.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENDING = ".imports"  # of the list, beside the rank's receipt
_INSTALLED = ("/site-packages/", "/dist-packages/")

born: dict[str, str] = {}  # the environment that this process's program began with


def write(write_file: Callable[[str, bytes], None]) -> None:
    """Write the list; the first rank of a node does. Raises OSError.

    Args:
        write_file: makes a file with this ending and content beside the receipt.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        write_file(ENDING, "\n".join([*_installed(), *_assigned()]).encode())


def _installed() -> Iterator[str]:
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__dict__", {}).get("__spec__")
        origin = getattr(spec, "origin", None)
        if not isinstance(origin, str) or getattr(spec, "name", "") != name:
            continue
        if any(part in origin for part in _INSTALLED):
            yield name


def _assigned() -> Iterator[str]:
    for name in {*born, *os.environ} if born else ():
        ours = name.startswith("SAFERUN_")
        if os.environ.get(name) != born.get(name) and name.isidentifier() and not ours:
            yield name + "="
