"""List the imports of a rank when it joins its group, and of a job's first Python at its end.

The next start of the script imports these modules of installed packages ahead, in this order, and
regards the environment variables that the program has assigned so far (start/imports.py). A search
lists them after its first trial. Modules that a hook's target imports later are added:
`torch._dynamo`, which any optimizer imports at its first step.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENDING = ".imports"  # suffix of the list, beside the rank's receipt
_INSTALLED = ("/site-packages/", "/dist-packages/")

born: dict[str, str] = {}  # the environment when this process's program began
_listed: set[str] = set()


def write(open_file: Callable[[str], int | None]) -> None:
    """Write the list, or its new part; only the first rank of a node does. Raises OSError.

    Args:
        open_file: function that opens a file with this suffix beside the receipt, for appending.
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
