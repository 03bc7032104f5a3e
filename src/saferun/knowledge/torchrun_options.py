"""torchrun's options, of the newest torch that this table was compared with.

Source: torch/distributed/run.py (`get_args_parser`); a test compares the table with the installed
torch.
"""

from __future__ import annotations

from saferun.model import Option

TABLE_TORCH = "2.13"  # the torch that OPTIONS describes


def _option(name: str, short: str = "", *, flag: bool = False, env: bool = True) -> Option:
    """Return torchrun's option `name`, in its spellings with dashes and with underscores."""
    dest = name.replace("-", "_")
    strings = dict.fromkeys((short, "--" + name, "--" + dest))
    spelled = tuple(string for string in strings if string)
    return Option(dest, spelled, flag, "PET_" + dest.upper() if env else None)


# In the parser's order, which its message about an ambiguous abbreviation follows.
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
