"""Pure: programs that start scripts themselves, and what to write if one stands as SCRIPT."""

from __future__ import annotations

import re

_TYPE = "it starts the ranks itself (`What to type` in docs/usage.md)"
# Name of a program -> what to write instead.
_INSTEAD = {
    r"torchrun|saferun": "saferun stands in its place: leave the word out",
    r"(?:python|pypy)[\d.]*": "saferun starts the Python itself: leave the word out",
    r"accelerate": f"{_TYPE}: saferun --nproc-per-node N SCRIPT in place of `accelerate launch`",
    r"deepspeed": f"{_TYPE}: saferun --nproc-per-node N SCRIPT in place of `deepspeed`",
    r"(?:ba|da|z|k)?sh": "saferun starts a Python script: within a shell script, it stands where "
    "torchrun stands (saferun adopt FILE)",
    r"srun|mpirun|mpiexec|uv|poetry|conda|nohup|env|time|timeout|nsys|numactl": (
        "it stands in front of saferun, not behind"
    ),
}


def hint(script: str | None) -> str:
    """Return what to write if SCRIPT is the name of such a program; "" for any other script."""
    name = (script or "").rpartition("/")[2]
    found = (text for names, text in _INSTEAD.items() if re.fullmatch(names, name))
    return "".join(f"`{name}` is taken for the script; {text}" for text in found)
