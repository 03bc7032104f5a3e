"""Pure: what a script was read to do by itself (`script_ast`)."""

from __future__ import annotations

from collections.abc import Mapping

from saferun.named_tuple import NamedTuple


class Calls(NamedTuple):
    """What a script sets, with line numbers."""

    assigned: Mapping[str, tuple[str | None, int]]  # variable -> (value if constant, line)
    config: Mapping[str, int]  # inductor's config name, or key of torch.compile(options=) -> line
    modes: Mapping[str, int]  # mode of torch.compile -> line
    called: Mapping[str, int]  # "torch.set_num_threads" -> line
