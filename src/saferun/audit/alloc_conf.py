"""Pure: which values of PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF torch can parse.

torch parses them at the first use of a GPU, minutes into a job, and raises if it cannot.
Sources: c10/core/AllocatorConfig.h and .cpp, c10/cuda/CUDAAllocatorConfig.h of torch 2.4 to 2.15.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from saferun.system.spelling import nearest

SWITCHES = (  # True or False, in exactly this spelling (ConfigTokenizer::toBool)
    "expandable_segments",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_use_background_threads",
    "pinned_free_catch_all",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
)
NUMBERS = (
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "large_segment_size_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
)
FRACTIONS = ("garbage_collection_threshold", "per_process_memory_fraction")
SMALLEST = {"max_split_size_mb": 20}
OTHERS = ("backend", "roundup_power2_divisions")
KEYS = (*SWITCHES, *NUMBERS, *FRACTIONS, *OTHERS)
ASYNC = "cudaMallocAsync"


def items(text: str) -> list[tuple[str, str]]:
    """Return key and value of each item; a list in brackets is one value."""
    found = re.findall(r"([^,:\[\]]+)(?::(\[[^\]]*\]|[^,]*))?", text)
    return [(key.strip(), value.strip()) for key, value in found if key.strip()]


def errors(text: str) -> Iterator[tuple[str, str]]:
    """Yield each error of a value, with its fix."""
    given = items(text)
    for key, value in given:
        if key not in KEYS:
            yield f"{key} is not a setting of the allocator", _nearest(key)
        elif key in SWITCHES and value not in ("True", "False"):
            is_on = value.lower() in ("true", "1", "yes", "on")
            yield f"{key} takes True or False, not `{value}`", f"{key}:{is_on}"
        elif key in NUMBERS and not _number(value, SMALLEST.get(key, 0)):
            smallest = f" from {SMALLEST[key]} on" if key in SMALLEST else ""
            yield f"{key} takes a whole number{smallest}, not `{value}`", f"{key}:512"
        elif key == "backend" and value not in ("native", ASYNC):
            yield f"there is no backend `{value}`", f"backend:native or backend:{ASYNC}"
        elif key in FRACTIONS and not _fraction(key, value):
            yield f"{key} takes a number between 0 and 1, not `{value}`", f"{key}:0.8"
    if ("backend", ASYNC) in given and "max_split_size_mb" in dict(given):
        yield f"max_split_size_mb is ignored under backend:{ASYNC}", "leave out one or the other"


def _number(value: str, smallest: int) -> bool:
    return re.fullmatch(r"\d{1,12}", value) is not None and int(value) >= smallest


def _fraction(key: str, value: str) -> bool:
    if not re.fullmatch(r"\d{1,30}(?:\.\d{1,30})?|\.\d{1,30}", value):
        return False
    return 0 < float(value) < 1 or (float(value) == 1 and key == "per_process_memory_fraction")


def _nearest(key: str) -> str:
    near = nearest(key, KEYS)
    return f"did you mean {near}?" if near else f"known: {', '.join(sorted(KEYS))}"
