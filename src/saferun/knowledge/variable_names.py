"""Environment variables that are lists, with their syntax, and variables that have two names."""

from __future__ import annotations

# Two names of one list. Which one torch reads first depends on its version (pytorch#183387): if the
# user has exported only the other one, both get the merged value.
OTHER_NAME = {
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF",
}
# The syntax of lists: (separator of items, separator of an item's name and its value).
LISTS = {
    "PYTORCH_ALLOC_CONF": (",", ":"),
    "PYTORCH_CUDA_ALLOC_CONF": (",", ":"),
    "NCCL_DEBUG_SUBSYS": (",", ""),
    "PYTHONPATH": (":", ""),
    "LD_LIBRARY_PATH": (":", ""),
    "TF_XLA_FLAGS": (" ", "="),
    "XLA_FLAGS": (" ", "="),
}


def items(text: str, between: str) -> list[str]:
    """Return the items of a list, stripped, without empty ones."""
    return [item.strip() for item in text.split(between) if item.strip()]


def combine(name: str, older: str, newer: str) -> str:
    """Return a merged list: an item of the newer value replaces an older one of the same name.

    Args:
        name: of the variable, a key of LISTS.
        older: the earlier value.
        newer: the later value.
    """
    between, pair = LISTS[name]
    wins = {item.split(pair, 1)[0] if pair else item for item in items(newer, between)}
    kept = [
        item
        for item in items(older, between)
        if (item.split(pair, 1)[0] if pair else item) not in wins
    ]
    return between.join([*kept, *items(newer, between)])
