"""List what a rank has imported when it joins its group, and a job's first Python when it ends.

The next start of the script imports these modules of installed packages ahead, in this order, and
heeds the environment variables that the program has assigned so far (start/imports.py). A search
lists them after its first trial. What brings a hook's target along later is added: `torch._dynamo`,
which any optimizer imports at its first step.
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
_listed: set[str] = set()


def write(open_file: Callable[[str], int | None]) -> None:
    """Write the list, or what is new; the first rank of a node does. Raises OSError.

    Args:
        open_file: opens a file with this ending beside the receipt, to append to it.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0" and (fd := open_file(ENDING)) is not None:
        new = [line for line in (*_installed(), *_assigned()) if line not in _listed]
        _listed.update(new)
        with open(fd, "wb") as file:
            file.write("".join(f"{line}\n" for line in new).encode())


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
