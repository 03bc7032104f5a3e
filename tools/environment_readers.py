"""Which environment variables a package reads, found in its files without importing it.

Python sources are read by `ast`, C++ headers by pattern, shared libraries by their strings. A
string in a library is evidence that the name matters there, not proof of a read: it may be part of
a message. Some names are not found: the tail of a longer string (linkers merge those), one that the
program composes, one that the compiler cut into 16-byte constants. The headers in the wheels show
most of these; that a library lacks a string proves nothing.
"""

from __future__ import annotations

import ast
import collections
import pathlib
import re
from collections.abc import Iterable, Iterator

FAMILIES = r"(?:(?:PY)?TORCH|CUDA|NCCL_|GLOO_|TF_|OMP_|GOMP_|KMP_|PET_|TRITON_)"
NAME = re.compile(FAMILIES + r"[A-Z0-9_]*[A-Z0-9]")
OWN_LIBRARY = re.compile(r"^(?!libcu|libLLVM).*\.so(\.\d+)*$")  # NVIDIA's own are beside them
QUOTED = re.compile("[\"']" + FAMILIES + "|action=(?:check_)?env")
BEGINNINGS = (
    *(b"PYTORCH", b"TORCH", b"CUDA", b"NCCL_", b"GLOO_", b"TF_", b"OMP_", b"GOMP_", b"KMP_"),
    *(b"PET_", b"TRITON_"),
)
IN_LIBRARY = re.compile(rb"[A-Z0-9_]{4,79}(?=\x00)")
IN_HEADER = re.compile(r'"(' + FAMILIES + r'[A-Z0-9_]*[A-Z0-9])"')
READS_IN_HEADER = re.compile(r"get_?env|getCvar|check_env|std::vector<std::string> TORCH_", re.I)
# Upper-case strings in libraries that are no variables: error codes, macros, enumerators, opcodes.
NO_VARIABLE = re.compile(
    r"CUDA|CUDA_?\d+E?|CUDA[A-BD-Z][A-Z]?|CUDART|CUDA_HELPE|CUDA_(?:ERROR|R|API|C|ARRAY|CUFFT|BATCH|MEMCPY)_\w+|CUDA_(?:DRIVER|RUNTIME|KERNEL|SUCCESS)"
    r"|(?:PY)?TORCH|TORCH_(?:LIBRARY|FUNCTION|INTERNAL|CHECK|WARN|DISPATCH)\w*|TORCHSCRIPT\w*"
    r"|NCCL_(?:OP|CONV|SPLIT|UNIQUE|SYMK|LOG|DEV_WORK|CRYPT|ENCRYPTION|GIN_TYPE|CFT_TEAM)_\w+"
    r"|NCCL_PARAM_(?:FLAG|TYPE)_\w+|NCCL_CTA_POLICY_\w+|NCCL_\w*_VERSION|NCCL_\w+_REF_COUNT"
    r"|OMP_SWAP|OMP_(?:TGT|INFOTYPE|REQ|IPR|DECLARE_TARGET|GET|SET)_\w+|KMP_FOR_T\w+"
    r"|TF_(?:ATTR_\w+|Q?U?INT\d+|FLOAT|DOUBLE|HALF|BOOL|STRING|COMPLEX\d*|OK|INTERNAL|ABORTED)"
)
# Nodes that may read a variable, or pass its name on; the others are most of a module.
MAY_READ = (
    *(ast.Call, ast.Subscript, ast.Compare),
    *(ast.Assign, ast.AnnAssign, ast.For, ast.comprehension),
)
# These only print what is set, or translate sources: that is not reading.
PRINTERS = ("_dump_DDP_relevant_env_vars",)
# The strings of these in torch's libraries are no reads: DistributedDataParallel records them
# (torch/csrc/distributed/c10d/logger.cpp), ProcessGroupNCCL prints them, or torch says with what it
# was built.
RECORDED = {
    "torch": {
        *("NCCL_DEBUG", "NCCL_IB_TIMEOUT", "NCCL_NTHREADS", "NCCL_SOCKET_IFNAME"),
        *("CUDA_VERSION", "TORCH_VERSION"),
    }
}
NOT_READERS = ("utils/hipify/", "utils/collect_env.py")

# A variable's name -> files, relative to the package. Among them is "=1" where every read compares
# the value with "1", and "=any" where every read only asks whether it is set, even to "0".
Readers = dict[str, set[str]]


def readers(package: pathlib.Path) -> Readers:
    """Return the files of an unpacked or installed package that read each variable.

    Args:
        package: its folder, such as `site-packages/torch`.
    """
    found: Readers = {}
    sources = dict(_sources(package))
    carriers = {name for nodes in sources.values() for name in _carriers(nodes)}
    for file, nodes in sources.items():
        for name in _names_in_python(nodes, carriers):
            found.setdefault(name, set()).add(file)
    for path in sorted(package.rglob("*")):
        if path.suffix in (".h", ".hpp", ".cuh"):
            names = _names_in_header(path)
        elif OWN_LIBRARY.search(path.name) and not path.is_symlink():
            names = _names_in_library(path)
        else:
            continue
        for name in names:
            if not NO_VARIABLE.fullmatch(name) and not name.endswith("_H"):
                found.setdefault(name, set()).add(path.name)
    for name, how in _understood(sources.values()).items():
        if all(file.endswith(".py") for file in found.get(name, {""})):
            found[name].add(how)
    return found


def _sources(package: pathlib.Path) -> Iterator[tuple[str, list[ast.AST]]]:
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        text = path.read_text(encoding="utf-8", errors="replace")
        if "env" in text and QUOTED.search(text) and not file.startswith(NOT_READERS):
            try:
                yield file, _nodes(ast.parse(text))
            except SyntaxError:  # a template
                continue


def _names_in_header(path: pathlib.Path) -> set[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    return set(IN_HEADER.findall(text)) if READS_IN_HEADER.search(text) else set()


def _names_in_library(path: pathlib.Path) -> set[str]:
    """Return the strings that are names: ended by a zero byte, after any other constant.

    Over gigabytes, a search for each family's beginning takes a sixth of the time of a pattern.
    """
    content, found = path.read_bytes(), set()
    for beginning in BEGINNINGS:
        at = content.find(beginning)
        while at >= 0:
            match = IN_LIBRARY.match(content, at)
            before = content[at - 1 : at]
            # TORCH_X within PYTORCH_X, OMP_X within GOMP_X; "L31TORCH_XE" is a mangled symbol
            if match and before not in b"_YG" and not before.isdigit():
                found.add(match[0].decode())
            at = content.find(beginning, at + 1)
    return {name for name in found if NAME.fullmatch(name)}


# Python


def _names_in_python(nodes: list[ast.AST], carriers: set[str]) -> set[str]:
    """Return the names that a module reads: literal in the read, or passed to it by a variable."""
    found: set[str] = set()
    for node in nodes:
        for place in _reads(node):
            found |= _constants(place)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(node.value, ast.Constant) or carriers & set(map(_last, targets)):
                found |= _constants(node.value)
        if isinstance(node, ast.For | ast.comprehension) and _last(node.target) in carriers:
            found |= _constants(node.iter)
        found |= _torchrun_option(node)
    return {name for name in found if NAME.fullmatch(name)}


def _nodes(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes of a module that may read, without those of functions that only print."""
    found: list[ast.AST] = []
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if not (isinstance(node, ast.FunctionDef) and node.name in PRINTERS):
            if isinstance(node, MAY_READ):
                found.append(node)
            todo += ast.iter_child_nodes(node)
    return found


def _understood(sources: Iterable[list[ast.AST]]) -> dict[str, str]:
    """Return how a value is used, "=1" or "=any", for the names whose reads all agree."""
    reads: collections.Counter[str] = collections.Counter()
    ways: collections.Counter[tuple[str, str]] = collections.Counter()
    for node in (node for nodes in sources for node in nodes):
        reads.update(_read_by(node))
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
            if _constants(node.comparators[0]) == {"1"}:
                ways.update((name, "=1") for name in _read_by(node.left))
        elif isinstance(node, ast.Call) and _last(node.func) == "bool" and node.args:
            ways.update((name, "=any") for name in _read_by(node.args[0]))
    return {name: how for (name, how), times in ways.items() if times == reads[name]}


def _read_by(node: ast.AST) -> set[str]:
    """Return the names that an expression reads."""
    return {name for place in _reads(node) for name in _constants(place) if NAME.fullmatch(name)}


def _carriers(nodes: list[ast.AST]) -> set[str]:
    """Return the Python variables that hold a name when the environment is read."""
    return {
        _last(node)
        for holder in nodes
        for place in _reads(holder)
        for node in ast.walk(place)
        if isinstance(node, ast.Name | ast.Attribute) and _last(node) not in ("os", "environ")
    } - {"", "name", "key", "k", "var", "x", "default", "value", "self", "str", "int", "env"}


def _reads(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node that are names of environment variables it reads."""
    if isinstance(node, ast.Call):
        last = _last(node.func)
        if last in ("get", "pop", "setdefault"):
            yield from node.args[:1] if _is_environ(_owner(node.func)) else []
        elif re.search(r"env|load_boolean_flag", last, re.I) and not re.search("set|put", last):
            yield from node.args
        yield from (k.value for k in node.keywords if k.arg and "env" in k.arg)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        yield from [node.slice] if _is_environ(node.value) else []
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        yield from [node.left] if _is_environ(node.comparators[0]) else []


def _owner(function: ast.AST) -> ast.AST:
    return function.value if isinstance(function, ast.Attribute) else function


def _is_environ(node: ast.AST) -> bool:
    """Return whether a node is os.environ, or has a name like worker_env or envs[0]."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return "env" in _last(node).lower() or (
        isinstance(node, ast.Attribute) and _is_environ(node.value)
    )


def _constants(place: ast.AST) -> set[str]:
    """Return the strings of an expression: a literal, or those of a list, tuple, set or choice."""
    nodes = [place]
    if isinstance(place, ast.List | ast.Tuple | ast.Set):
        nodes = list(place.elts)
    elif isinstance(place, ast.IfExp):
        nodes = [place.body, place.orelse]
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _torchrun_option(node: ast.AST) -> set[str]:
    """Return the PET_ variable of an `add_argument(…, action=env)` (argparse_util.py)."""
    if not (isinstance(node, ast.Call) and _last(node.func) == "add_argument"):
        return set()
    if not any(k.arg == "action" and _last(k.value) in ("env", "check_env") for k in node.keywords):
        return set()
    options = [text for arg in node.args for text in _constants(arg) if text.startswith("--")]
    return {"PET_" + options[0][2:].replace("-", "_").upper()} if options else set()
