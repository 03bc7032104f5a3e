"""torchrun's options, by release of torch.

Source: torch/distributed/run.py (`get_args_parser`) of the released wheels; a test compares the
table with the installed torch.
"""

from __future__ import annotations

import re

from saferun.model import Option

_OLDEST, _NEWEST = 4, 13  # releases of torch 2 that the table describes; OPTIONS is the newest's
_SINCE = {  # option -> the torch 2 release that added it; none was removed
    "event_log_handler": 8,
    "numa_binding": 9,
    "duplicate_stdout_filters": 10,
    "duplicate_stderr_filters": 10,
    "signals_to_handle": 10,
    "virtual_local_rank": 10,
    "shutdown_timeout": 12,
}


def _option(name: str, short: str = "", *, flag: bool = False, env: bool = True) -> Option:
    """Return torchrun's option `name`, in its spellings with dashes and with underscores."""
    dest = name.replace("-", "_")
    strings = dict.fromkeys((short, "--" + name, "--" + dest))
    spelled = tuple(string for string in strings if string)
    return Option(dest, spelled, flag, "PET_" + dest.upper() if env else None)


# The order is that of torchrun's parser: its message about an ambiguous abbreviation lists the
# options in it.
OPTIONS: tuple[Option, ...] = (
    _option("help", "-h", flag=True, env=False),
    _option("nnodes"),
    _option("nproc-per-node"),
    _option("rdzv-backend"),
    _option("rdzv-endpoint"),
    _option("rdzv-id"),
    _option("rdzv-conf"),
    _option("standalone", flag=True),
    _option("max-restarts"),
    _option("monitor-interval"),
    _option("start-method"),
    _option("event-log-handler"),
    _option("role"),
    _option("module", "-m", flag=True),
    _option("no-python", flag=True),
    _option("run-path", flag=True),
    _option("log-dir"),
    _option("redirects", "-r"),
    _option("tee", "-t"),
    _option("local-ranks-filter"),
    _option("duplicate-stdout-filters"),
    _option("duplicate-stderr-filters"),
    _option("node-rank"),
    _option("master-addr"),
    _option("master-port"),
    _option("local-addr"),
    _option("logs-specs", env=False),
    _option("numa-binding", env=False),
    _option("signals-to-handle"),
    _option("shutdown-timeout"),
    _option("virtual-local-rank", flag=True),
)


def of_torch(version: str) -> tuple[Option, ...] | None:
    """Return the options of a torch release; None for builds of unknown releases.

    Args:
        version: torch's version, such as "2.11.0+cu130".

    >>> [len(of_torch(version) or ()) for version in ("2.4.1", "2.13.0+cpu", "2.6.0a0+ecf3bae40a")]
    [24, 31, 0]
    """
    release = re.fullmatch(r"2\.(\d+)\.\d+(?:\+\S*)?", version)
    if release is None or not _OLDEST <= (minor := int(release[1])) <= _NEWEST:
        return None
    return tuple(option for option in OPTIONS if _SINCE.get(option.dest, 0) <= minor)
