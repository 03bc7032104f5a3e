"""Check labels and indices before a kernel in which a wrong one makes the CUDA context unusable.

Target: cross_entropy, nll_loss, embedding and embedding_bag of torch.nn.functional, which the
modules (CrossEntropyLoss, NLLLoss, Embedding) call, too; torch >= 2.4.
Reason: a label or index out of range causes a device-side assert, which names neither the line nor
the value, and after which every CUDA call of the process fails
(https://github.com/pytorch/pytorch/issues/7081).
Delete when torch raises an error for the call with its values, as on a CPU.

Settings (hooks.guards): labels, embeddings, logits (on | off). A check waits for the GPU once.
Dynamo and torch.jit use torch's own functions, so compiled code has no checks. Nothing is checked
while a CUDA graph is captured, in functorch's transforms, under a dispatch mode, or for a subclass
of Tensor (DTensor).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ... import contract, hidden_frames
from ...context import Context
from .. import cuda_failures
from .index_checks import check_range, on_rank

Check = Callable[[str, Mapping[str, Any]], "Exception | None"]

_HOOK = "guards"
_failed: list[bool] = []  # set once a check has failed; the GPU is not asked again


def apply(name: str, module: ModuleType, context: Context) -> None:
    """Put the profile's checks before the functions.

    Args:
        name: "torch.nn.functional".
        module: that module.
        context: the process's context.
    """
    settings = context.hooks.guards
    losses: list[Check] = []
    if settings.logits == "on":
        losses.append(_check_shapes)
    if settings.labels == "on":
        losses.append(_check_labels)
    lookups: list[Check] = [_check_indices] if settings.embeddings == "on" else []
    functions = {
        **dict.fromkeys(("cross_entropy", "nll_loss"), losses),
        **dict.fromkeys(("embedding", "embedding_bag"), lookups),
    }
    if not losses and not lookups:
        context.receipt(_HOOK, contract.OFF)
        return
    for function, checks in functions.items():
        if checks and hasattr(module, function):
            _guard(module, function, checks, context)
    context.receipt(_HOOK, contract.APPLIED, settings=dict(vars(settings)))


def _guard(module: ModuleType, name: str, checks: list[Check], context: Context) -> None:
    torchs_own = getattr(module, name)
    names = list(inspect.signature(torchs_own).parameters)

    @hidden_frames.replace(module, name)
    def guarded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not _failed and not cuda_failures.unusable:
            finding = None
            try:
                arguments = {**dict(zip(names, args)), **kwargs}
                finding = next(filter(None, (check(name, arguments) for check in checks)), None)
            except Exception as error:
                _note(context, error)
            if finding is not None:
                context.receipt(_HOOK, contract.OBSERVED, finding=str(finding))
                context.activate()
                raise finding
        return original(*args, **kwargs)

    # Dynamo, torch.jit.script and torch.jit.trace use torch's own function instead of one marked
    # so.
    guarded.__script_if_tracing_wrapper = True  # type: ignore[attr-defined]  # torch's mark
    guarded.__original_fn = torchs_own  # type: ignore[attr-defined]  # torch's mark


def _note(context: Context, error: Exception) -> None:
    """Note that a check failed; the script's own call will also meet the GPU's error."""
    if not cuda_failures.is_of_gpu(error):
        context.failed(_HOOK, error)
    if not cuda_failures.is_memory(error):
        _failed.append(True)


# The checks.


def _check_labels(name: str, arguments: Mapping[str, Any]) -> Exception | None:
    """Check that labels lie in 0 … classes-1 or are `ignore_index`; probabilities have no range."""
    logits: Any = arguments.get("input")
    labels: Any = arguments.get("target")
    if not (_is_plain(logits) and _is_plain(labels)) or logits.dim() == 0:
        return None
    if labels.is_floating_point() or labels.is_complex() or not labels.numel():
        return None
    classes = logits.shape[1 if logits.dim() > 1 else 0]
    return check_range(name, labels, classes, arguments.get("ignore_index", -100))


def _check_indices(name: str, arguments: Mapping[str, Any]) -> Exception | None:
    """Check that indices lie in 0 … rows-1 of the table."""
    indices: Any = arguments.get("input")
    table: Any = arguments.get("weight")
    if not _is_plain(indices) or not hasattr(table, "shape") or not indices.numel():
        return None
    if indices.is_floating_point():  # embedding_bag's older order of arguments: (weight, input)
        return None
    return check_range(name, indices, table.shape[0], None)


def _check_shapes(name: str, arguments: Mapping[str, Any]) -> Exception | None:
    """Check the labels' shape: (N, d1, …) for logits (N, C, d1, …), or the shape of the logits."""
    logits: Any = arguments.get("input")
    labels: Any = arguments.get("target")
    if not (_is_plain(logits) and _is_plain(labels)) or logits.dim() == 0:
        return None
    shape, found = tuple(logits.shape), tuple(labels.shape)
    expected = () if len(shape) == 1 else (shape[0], *shape[2:])
    if found in (expected, shape) or (name == "nll_loss" and len(shape) < 2):
        return None
    text = f"{name}: logits of shape {shape} go with labels of shape {expected}, not {found}"
    if len(shape) > 2 and found == shape[:-1]:
        text += "; the classes come second: logits.transpose(1, -1)"
    return ValueError(text + on_rank())


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor whose content can be read here and now."""
    torch = sys.modules["torch"]
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack():
        return False
    if torch._C._get_tracing_state() is not None or torch.compiler.is_compiling():
        return False
    return not (value.is_cuda and torch.cuda.is_current_stream_capturing())
