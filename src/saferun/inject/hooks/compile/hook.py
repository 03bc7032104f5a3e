"""Enforce the profile's settings for compilation, even if the script asks for something else.

Targets, and the settings that each one enforces:
  torch                                    enabled: torch.compile (Module.compile ends there too)
  torch.nn.attention.flex_attention        enabled: stays compiled on CUDA, where eager is quadratic
  torch._inductor.compile_fx               autotune, cudagraphs, non-lazy backward for fallback
  torch._inductor.runtime.triton_heuristics  autotune: one launcher for each generated kernel
  torch._dynamo.backends.cudagraphs        cudagraphs: the backend of that name
  torch._dynamo.convert_frame              fallback: suppress_errors
The mitigations of compilation are in mitigations.py.
Reason: `mode=`, `options=` and assignments to torch._inductor.config override the environment
variables that would switch these off. A setting is in force during one graph's compilation, by
inductor's own `config.patch`, including a lazily compiled backward. torch 2.4 to 2.13.
Delete a part when torch has a switch that a script's own choice does not override.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys

from ... import contract, hidden_frames, rank
from . import mitigations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import FrameType, ModuleType
    from typing import Any

    from saferun.settings import CompileHook

    from ...context import Context

    Hold = Callable[[ModuleType, CompileHook, Context], None]

_HOOK = "compile"
_MARK = "_saferun_held"
_NO_AUTOTUNE = {
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "triton.autotune_pointwise": False,
    # Opt-in settings that measure several candidates for one kernel, at compilation or first run:
    "triton.multi_kernel": 0,
    "triton.mix_order_reduction_autotune_split_size": False,
    "benchmark_combo_kernel": False,
    "combo_kernels_autotune": 0,
    "incremental_autotune": False,
}
_NO_GRAPHS = {"triton.cudagraphs": False}


def apply(name: str, module: ModuleType, context: Context) -> None:
    """Enforce this module's part of `hooks.compile`.

    Args:
        name: one of the targets.
        module: that module.
        context: the process's context.
    """
    parts: dict[str, Hold] = {
        "torch": _hold_entry,
        "torch.nn.attention.flex_attention": _hold_flex_attention,
        "torch._inductor.compile_fx": _hold_inductor,
        "torch._inductor.runtime.triton_heuristics": _hold_launchers,
        "torch._dynamo.backends.cudagraphs": _hold_cudagraphs_backend,
        "torch._dynamo.convert_frame": _hold_frames,
    }
    if name == "torch":
        mitigations.give_rank_own_caches(context)
    if name == "torch._dynamo.convert_frame":
        mitigations.switch_ddp_optimizer_off(module, context)
    parts[name](module, context.hooks.compile, context)


def _graphs_are_off(settings: CompileHook) -> bool:
    setting = settings.cudagraphs
    return setting == "off" or (setting == "off-when-distributed" and rank.is_distributed())


def _is_in_torch(frame: FrameType) -> bool:
    # torch itself compiles small functions (higher-order operators, flex_attention's eager form).
    caller: str = frame.f_globals.get("__name__", "")
    return caller.startswith("torch.") and caller not in ("torch.nn.modules.module",)


# enabled


def _hold_entry(torch: ModuleType, settings: CompileHook, context: Context) -> None:
    if settings.enabled != "off":
        context.receipt(_HOOK, contract.OFF, part="enabled")
        return
    if hasattr(torch.compile, _MARK):
        return

    @hidden_frames.replace(torch, "compile")
    def compile(original: Callable[..., Any], model: Any = None, **kwargs: Any) -> Any:
        if _is_in_torch(hidden_frames.caller()):
            return original(model, **kwargs)
        if model is None:
            return functools.partial(compile, **kwargs)
        flex = _flex_inside(model)
        context.activate()
        if flex is not None:
            return original(flex, **kwargs)
        name = getattr(model, "__qualname__", None) or type(model).__name__
        context.receipt(_HOOK, contract.OBSERVED, part="enabled", left_eager=name)
        return torch._dynamo.disable(model)

    setattr(compile, _MARK, True)
    context.receipt(_HOOK, contract.APPLIED, part="enabled")


def _flex_inside(model: Any) -> Any:
    """Return the function to compile if `model` is flex_attention or its mask builder."""
    if isinstance(model, functools.partial):
        inside = _flex_inside(model.func)
        return inside and functools.partial(inside, *model.args, **model.keywords)
    if getattr(model, "__module__", "") != "torch.nn.attention.flex_attention":
        return None
    return getattr(model, _MARK, model)


def _hold_flex_attention(module: ModuleType, settings: CompileHook, context: Context) -> None:
    if settings.enabled != "off":
        return
    import torch

    torchs_own = module.flex_attention
    compiled: list[Callable[..., Any]] = []

    @hidden_frames.replace(module, "flex_attention")
    def flex_attention(original: Callable[..., Any], query: Any, *args: Any, **kwargs: Any) -> Any:
        if not query.is_cuda or torch.compiler.is_compiling():
            return original(query, *args, **kwargs)
        if not compiled:
            # Use torch's own compile, since ours would leave the function eager.
            compiled.append(getattr(torch.compile, "__wrapped__", torch.compile)(original))
        return compiled[0](query, *args, **kwargs)

    setattr(flex_attention, _MARK, torchs_own)
    context.receipt(_HOOK, contract.APPLIED, part="flex_attention")


# autotune and cudagraphs


def _hold_inductor(module: ModuleType, settings: CompileHook, context: Context) -> None:
    signature = inspect.signature(module.compile_fx)

    @hidden_frames.replace(module, "compile_fx")
    def compile_fx(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        inner = bound.arguments["inner_compile"]
        if hasattr(inner, _MARK):  # compile_fx calls itself, with its patches in force
            return original(*args, **kwargs)
        policy = _policy(settings, module.config)
        bound.arguments["inner_compile"] = _watched(inner, module.config, context)
        patches = dict(bound.arguments["config_patches"] or {}, **policy)
        bound.arguments["config_patches"] = patches
        with module.config.patch(patches):  # a cached graph is not lowered: read it back here, too
            _observe(context, "entry", module.config)
        with _non_lazy_backward(settings):
            return original(*bound.args, **bound.kwargs)

    context.receipt(_HOOK, contract.APPLIED, part="inductor")


def _policy(settings: CompileHook, config: ModuleType) -> dict[str, object]:
    """Return inductor's settings for the present graph, except those that this torch lacks."""
    policy: dict[str, object] = {}
    if settings.autotune == "off":
        policy.update(_NO_AUTOTUNE)
    if _graphs_are_off(settings):
        policy.update(_NO_GRAPHS)
    return {key: value for key, value in policy.items() if _has(config, key)}


def _has(config: ModuleType, key: str) -> bool:
    try:
        _read(config, key)
    except Exception:
        return False
    return True


def _read(config: Any, key: str) -> object:
    for part in key.split("."):
        config = getattr(config, part)
    value: object = config
    return value


def _watched(inner: Callable[..., Any], config: ModuleType, context: Context) -> Callable[..., Any]:
    """Return `inner` with our mark; it reports the values in force whenever a graph is lowered.

    compile_fx applies its `config_patches` around it, even for a backward that is compiled later.
    """

    def inner_compile(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _observe(context, "backward" if kwargs.get("is_backward") else "forward", config)
        graph = original(*args, **kwargs)
        context.hook_late_imports()  # the generated code has loaded modules of inductor
        return graph

    marked = hidden_frames.wrapped(inner, inner_compile)
    setattr(marked, _MARK, True)
    return marked


_observed: list[tuple[int, str, dict[str, object]]] = []  # (pid, graph, values in force)


def _observe(context: Context, graph: str, config: ModuleType) -> None:
    context.activate()
    watched = [key for key in (*_NO_AUTOTUNE, *_NO_GRAPHS) if _has(config, key)]
    effective = {key: _read(config, key) for key in watched}
    entry = (os.getpid(), graph, effective)
    if entry not in _observed:
        _observed.append(entry)
        context.receipt(_HOOK, contract.OBSERVED, graph=graph, effective=effective)


def _hold_launchers(module: ModuleType, settings: CompileHook, context: Context) -> None:
    if settings.autotune != "off":
        return
    tuner = getattr(module, "CachingAutotuner", None)
    step = next((n for n in ("_make_launchers", "precompile") if hasattr(tuner, n)), None)
    if step is None:
        context.receipt(_HOOK, contract.NOT_NEEDED, part="launchers", why="no CachingAutotuner")
        return

    @hidden_frames.replace(tuner, step)
    def one_launcher(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if getattr(self, "custom_kernel", False):  # a user's own @triton.autotune stays unchanged
            _name_kept(self, context)
        else:
            _keep_first(self)

    _hold_timing(tuner)
    context.receipt(_HOOK, contract.APPLIED, part="launchers")


_kept: set[str] = set()  # the user's own kernels that are in the receipt


def _name_kept(tuner: Any, context: Context) -> None:
    name = str(getattr(getattr(tuner, "fn", None), "__name__", "a kernel of the script's own"))
    if len(getattr(tuner, "launchers", None) or ()) > 1 and name not in _kept:
        _kept.add(name)
        context.receipt(_HOOK, contract.OBSERVED, part="launchers", kept=name)


def _hold_timing(tuner: Any) -> None:
    """Skip the measurements at the first run of a kernel that was made before this hook."""
    if not hasattr(tuner, "autotune_to_one_config"):
        return

    @hidden_frames.replace(tuner, "autotune_to_one_config")
    def keep_first(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "custom_kernel", False):
            return original(self, *args, **kwargs)
        _keep_first(self)
        return None


def _keep_first(tuner: Any) -> None:
    """Keep only one launcher of a kernel, so that nothing is measured at its first run."""
    launchers = getattr(tuner, "launchers", None)
    if not launchers or len(launchers) < 2:
        return
    first = launchers[0]
    release = getattr(tuner, "_release_static_launchers_except", None)
    if release is not None:
        release(first)
    tuner.launchers = [first]
    results = getattr(tuner, "compile_results", None)
    if results:
        same = [result for result in results if result.config is getattr(first, "config", None)]
        tuner.compile_results = same[:1] or results[:1]


def _hold_cudagraphs_backend(module: ModuleType, settings: CompileHook, context: Context) -> None:
    if settings.cudagraphs == "keep" or not hasattr(module, "cudagraphs"):
        return

    @hidden_frames.replace(module, "cudagraphs")
    def cudagraphs(original: Callable[..., Any], model: Any, inputs: Any) -> Any:
        context.activate()
        off = _graphs_are_off(settings)
        context.receipt(_HOOK, contract.OBSERVED, part="cudagraphs backend", graphs=not off)
        if not off:
            return original(model, inputs)
        from torch._dynamo.backends.registry import lookup_backend

        return lookup_backend("aot_eager")(model, inputs)

    context.receipt(_HOOK, contract.APPLIED, part="cudagraphs backend")


# fallback


def _non_lazy_backward(settings: CompileHook) -> AbstractContextManager[object]:
    # A backward that is compiled with its forward fails while dynamo can still fall back to eager.
    config = sys.modules.get("torch._functorch.config")
    if settings.fallback != "on" or config is None:
        return contextlib.nullcontext()
    if not _has(config, "force_non_lazy_backward_lowering"):
        return contextlib.nullcontext()
    patch: AbstractContextManager[object] = config.patch(force_non_lazy_backward_lowering=True)
    return patch


def _hold_frames(module: ModuleType, settings: CompileHook, context: Context) -> None:
    if settings.fallback != "on":
        return
    config = module.config

    @hidden_frames.replace(module.ConvertFrame, "__call__")
    def convert(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        context.activate()
        config.suppress_errors = True
        return original(self, *args, **kwargs)

    context.receipt(_HOOK, contract.APPLIED, part="fallback")
