"""Environment variables that are lists, that have two names, or that load code."""

from __future__ import annotations

# Pairs of names for one list. Which one torch reads first depends on its version (pytorch#183387):
# if the user has exported only the other one, both get the merged value.
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
    """Return the items of a list, stripped, without empty ones.

    Args:
        text: the list.
        between: the separator of items.
    """
    return [item.strip() for item in text.split(between) if item.strip()]


def item_name(variable: str, item: str) -> str:
    """Return the name of an item of a list variable; the item itself if it has no value.

    Args:
        variable: the name of the variable, a key of LISTS.
        item: an item of its list.
    """
    _, pair = LISTS[variable]
    return item.split(pair, 1)[0] if pair else item


# Variables that make a program run code that its user did not name. Sources: ld.so(8), python(1),
# bash(1), perlrun(1), node(1), and the documentation of nccl, torch and triton on plugins,
# compilers and caches of code.
_LOADS_CODE = frozenset(
    items(
        "BASH_ENV,CC,CPATH,CUDA_HOME,CUDA_INJECTION64_PATH,CUDA_PATH,CXX,ENV,GCONV_PATH,HOME,"
        "HF_MODULES_CACHE,NCCL_NET,NCCL_NET_PLUGIN,NCCL_PROFILER_PLUGIN,NCCL_TUNER_PLUGIN,"
        "NODE_OPTIONS,NODE_PATH,PATH,PERL5DB,PERL5LIB,PERL5OPT,PROMPT_COMMAND,PYTHONBREAKPOINT,"
        "PYTHONEXECUTABLE,PYTHONHOME,PYTHONINSPECT,PYTHONPATH,PYTHONPLATLIBDIR,PYTHONPYCACHEPREFIX,"
        "PYTHONSTARTUP,PYTHONUSERBASE,PYTHONWARNINGS,PYTHON_EXEC,SHELLOPTS,TORCH_EXTENSIONS_DIR,"
        "TORCHINDUCTOR_CACHE_DIR,TRITON_CACHE_DIR,TRITON_CUOBJDUMP_PATH,TRITON_LIBCUDA_PATH,"
        "TRITON_PTXAS_PATH,VIRTUAL_ENV,XDG_CONFIG_HOME",
        ",",
    )
)
_LOADS_CODE_FAMILIES = ("LD_", "GIT_", "BASH_FUNC_", "OPENSSL_")


def loads_code(name: str) -> bool:
    """Return whether a variable can make a program load or run code that the user did not name."""
    return name in _LOADS_CODE or name.startswith(_LOADS_CODE_FAMILIES)


def combine(name: str, older: str, newer: str) -> str:
    """Return a merged list: an item of the newer value replaces an older one of the same name.

    Args:
        name: the variable's name, a key of LISTS.
        older: the earlier value.
        newer: the later value.
    """
    between, _ = LISTS[name]
    added = items(newer, between)
    replaced = {item_name(name, item) for item in added}
    kept = [item for item in items(older, between) if item_name(name, item) not in replaced]
    return between.join([*kept, *added])
