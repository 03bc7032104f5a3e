"""Check labels and indices in compiled code, too, by an operator that is opaque to inductor.

Target: torch._inductor.compile_fx; torch >= 2.4.
Reason: as in hook.py, for scripts that compile their loss or their embedding. The operator is
inserted into the graph that dynamo made, so there is no additional graph break. Custom backends and
torch.export, which do not use compile_fx, get an unchanged graph.
Delete together with hook.py.

Setting (hooks.guards.compiled): off, on. A graph stays unchanged if CUDA graphs are on, since their
replay calls no Python, or if it has functorch's transforms, for which the operator has no rule. The
operator returns a copy of the labels, which the loss uses: an operator without a result would be
removed as dead code.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ... import contract, hidden_frames
from ...context import Context
from .. import frames
from . import index_checks

# (name to report, place of the indices, place of the indexed data); a place is position and
# keyword.
Call = tuple[str, tuple[int, str], tuple[int, str]]

_HOOK = "guards"
_LIBRARY = "saferun"
_LOSSES = ("cross_entropy", "nll_loss")
_LOOKUPS = ("embedding", "embedding_bag")
_LINE = re.compile(r'File "(.*?)", line (\d+)')

_library: Any = None  # keeps the operator alive


def hold(module: ModuleType, context: Context) -> None:
    """Insert the operator into the graphs that `compile_fx` gets.

    Args:
        module: torch._inductor.compile_fx.
        context: the process's context.
    """
    settings = context.hooks.guards
    wanted = _LOSSES * (settings.labels == "on") + _LOOKUPS * (settings.embeddings == "on")
    if settings.compiled == "off" or not wanted:
        return
    calls = _calls(wanted)
    operator = _define(context)
    signature = inspect.signature(module.compile_fx)

    def insert(arguments: dict[str, Any]) -> None:
        patches = arguments.get("config_patches") or {}
        with module.config.patch(patches):
            if module.config.triton.cudagraphs:
                context.receipt(_HOOK, contract.OBSERVED, compiled="CUDA graphs are on: no checks")
                return
        checks = sum(_insert(graph, calls, operator) for graph in _graphs(arguments["model_"]))
        if checks:
            context.receipt(_HOOK, contract.OBSERVED, compiled="checks", count=checks)

    @hidden_frames.replace(module, "compile_fx")
    def compile_fx(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        context.guard(_HOOK, insert, bound.arguments)
        return original(*args, **kwargs)

    context.receipt(_HOOK, contract.APPLIED, part="compiled")


def _define(context: Context) -> Any:
    """Return the operator; the first call defines it."""
    global _library
    import torch

    if _library is None:
        schema = "(Tensor indices, str name, SymInt count, int? ignored, str place) -> Tensor"
        _library = torch.library.Library(_LIBRARY, "FRAGMENT")
        _library.define("in_range" + schema)
        check = functools.partial(_in_range, context)
        _library.impl("in_range", check, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_LIBRARY}::in_range", _fake, lib=_library)
    return torch.ops.saferun.in_range.default


def _fake(indices: Any, name: str, count: int, ignored: int | None, place: str) -> Any:
    return indices.new_empty(indices.shape)


def _in_range(
    context: Context, indices: Any, name: str, count: int, ignored: int | None, place: str
) -> Any:
    """Raise IndexError if an index is not in 0 … count-1; return a copy of the indices."""
    import torch

    capturing = indices.is_cuda and torch.cuda.is_current_stream_capturing()
    if not capturing and (finding := index_checks.check_range(name, indices, count, ignored)):
        text = f"{finding}, compiled from {place}"
        context.receipt(_HOOK, contract.OBSERVED, finding=text)
        context.activate()
        raise IndexError(text)
    return indices.clone(memory_format=torch.contiguous_format)


# The graph.


def _graphs(model: Any) -> Iterator[Any]:
    """Yield the graphs that dynamo passed on, including those under activation checkpointing."""
    graph = getattr(model, "graph", None)
    if graph is None or any("functorch" in _home(node.target) for node in graph.nodes):
        return
    yield graph
    for node in graph.nodes:
        inside: Any = node.args[0] if "activation_checkpoint" in str(node.target) else None
        if getattr(inside, "op", "") == "get_attr":
            yield from _graphs(getattr(model, inside.target, None))


def _home(target: Any) -> str:
    return getattr(target, "__module__", None) or str(target)


def _calls(wanted: tuple[str, ...]) -> dict[Any, Call]:
    """Return the functions that stand for the wanted ones in dynamo's graphs, and their calls."""
    import torch

    own = torch.nn.functional
    found: dict[Any, Call] = {}
    for name in wanted:
        if name in _LOSSES:
            places: tuple[tuple[int, str], ...] = ((1, "target"), (0, "input"))
            inner = [f"{name}_loss", f"{name}_nd", name]
            others = [getattr(torch._C._nn, one, None) for one in inner]
        else:
            places = ((0, "input"), (1, "weight"))
            inside = getattr(torch, name)  # the weight is its first argument
            found[inside] = (name, (1, "indices"), (0, "weight"))
            others = []
        wrapper = getattr(own, name)
        for function in (wrapper, getattr(wrapper, "__original_fn", None), *others):
            if function is not None:
                found[function] = (name, *places)  # type: ignore[assignment]  # two places
    return found


def _insert(graph: Any, calls: dict[Any, Call], operator: Any) -> int:
    """Insert checks before each of these calls in a graph; return the number of calls."""
    count = 0
    for node in list(graph.nodes):
        call = calls.get(node.target) if node.op == "call_function" else None
        if call is not None and _insert_before(graph, node, call, operator):
            count += 1
    if count:
        graph.owning_module.recompile()
    return count


def _insert_before(graph: Any, node: Any, call: Call, operator: Any) -> bool:
    name, *places = call
    indices, of = (_argument(node, *place) for place in places)
    found, table = _example(indices), _example(of)
    if not (_is_plain(found) and _is_plain(table)) or not table.dim():
        return False
    if found.is_floating_point() or found.is_complex() or indices.target is operator:
        return False
    is_loss = name in _LOSSES
    dimension = 1 if is_loss and table.dim() > 1 else 0
    size = table.shape[dimension]
    ignored = _argument(node, 4, "ignore_index") if is_loss else None  # its position in all of them
    if is_loss and not isinstance(ignored, int):
        ignored = -100
    with graph.inserting_before(node):
        count = size if isinstance(size, int) else graph.call_method("size", (of, dimension))
        line = _users_line(node.meta.get("stack_trace") or "")
        checked = graph.call_function(operator, (indices, name, count, ignored, line))
    checked.meta = {**node.meta, "example_value": found}
    node.replace_input_with(indices, checked)
    return True


def _example(node: Any) -> Any:
    """Return dynamo's fake tensor for a node; None if there is none."""
    return getattr(node, "meta", {}).get("example_value")


def _argument(node: Any, place: int, word: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(word)


def _is_plain(value: Any) -> bool:
    return type(value).__name__ in ("FakeTensor", "Tensor", "Parameter") and not value.is_nested


def _users_line(stack: str) -> str:
    """Return "file:line" of the innermost frame in the user's code in a node's stack."""
    places = _LINE.findall(stack)
    own = [place for place in places if frames.is_users_file(place[0])]
    return ":".join((own or places or [("unknown place", "0")])[-1])
