"""Hold what the profile says about compilation, however the script asks for something else.

Targets, and what each one holds:
  torch                                    enabled: torch.compile (Module.compile ends there too)
  torch.nn.attention.flex_attention        enabled: stays compiled on CUDA, where eager is quadratic
  torch._inductor.compile_fx               autotune, cudagraphs, non-lazy backward for fallback
  torch._inductor.runtime.triton_heuristics  autotune: one launcher for each generated kernel
  torch._dynamo.backends.cudagraphs        cudagraphs: the backend of that name
  torch._dynamo.convert_frame              fallback: suppress_errors; the mitigation
  ddp-optimizer-off os.environ                               the mitigation fresh-compile-cache: a
  directory for each rank
Reason: `mode=`, `options=` and assignments to torch._inductor.config override the environment
variables that would switch these off. A setting holds for the time of one graph's compilation
through inductor's own `config.patch`, also in the lazily compiled backward. torch 2.4 to 2.13.
Delete a part when torch has a switch that a script's own choice does not override.
"""

import functools
import os
import sys

from _saferun_inject import contract

_HOOK = "compile"
_MARK = "_saferun_held"
_NO_AUTOTUNE = {
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "triton.autotune_pointwise": False,
    # Opt-in ways to several candidates for one kernel, timed at compilation or at the first run:
    "triton.multi_kernel": 0,
    "triton.mix_order_reduction_autotune_split_size": False,
    "benchmark_combo_kernel": False,
    "combo_kernels_autotune": 0,
    "incremental_autotune": False,
}
_NO_GRAPHS = {"triton.cudagraphs": False}
# The mitigations that no variable and no setting of a profile can make (`assign`,
# `rank_directories`).
_DDP_OPTIMIZER_OFF = "ddp-optimizer-off"
_FRESH_CACHE = "fresh-compile-cache"
_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def apply(name, module, context):
    """Hold this module's part of `hooks.compile`."""
    settings = context.hooks.get(_HOOK) or {}
    parts = {
        "torch": _hold_entry,
        "torch.nn.attention.flex_attention": _hold_flex_attention,
        "torch._inductor.compile_fx": _hold_inductor,
        "torch._inductor.runtime.triton_heuristics": _hold_launchers,
        "torch._dynamo.backends.cudagraphs": _hold_cudagraphs_backend,
        "torch._dynamo.convert_frame": _hold_frames,
    }
    if name == "torch":
        _own_caches(context)
    if name == "torch._dynamo.convert_frame":
        _hold_ddp_optimizer(module, context)
    parts[name](module, settings, context)


def choice(value):
    """Return a setting as text: YAML may have made booleans of `on` and `off`."""
    return {True: "on", False: "off"}.get(value, value)


def is_distributed():
    """Tell whether this process has joined a process group, or is one of several that will."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None and c10d.is_initialized():
        return True
    size = os.environ.get("WORLD_SIZE", "")
    return "RANK" in os.environ and size.isdigit() and int(size) > 1


def _setting(settings, key, default="keep"):
    return choice(settings.get(key, default))


def _graphs_are_off(settings):
    chosen = _setting(settings, "cudagraphs")
    return chosen == "off" or (chosen == "off-when-distributed" and is_distributed())


def _is_torchs_own(frame):
    # torch compiles small things for itself (higher-order operators, flex_attention's eager form).
    caller = frame.f_globals.get("__name__", "")
    return caller.startswith("torch.") and caller not in ("torch.nn.modules.module",)


# enabled


def _hold_entry(torch, settings, context):
    if _setting(settings, "enabled") != "off":
        context.receipt(_HOOK, contract.OFF, part="enabled")
        return
    original = torch.compile
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def compile(model=None, **kwargs):
        if _is_torchs_own(sys._getframe(1)):
            return original(model, **kwargs)
        if model is None:
            return functools.partial(compile, **kwargs)
        flex = _flex_inside(model)
        context.activate()
        if flex is not None:
            return original(flex, **kwargs)
        context.receipt(_HOOK, contract.OBSERVED, part="enabled", left_eager=_name(model))
        return torch._dynamo.disable(model)

    setattr(compile, _MARK, True)
    torch.compile = compile
    context.receipt(_HOOK, contract.APPLIED, part="enabled")


def _name(model):
    return getattr(model, "__qualname__", None) or type(model).__name__


def _flex_inside(model):
    """Return the function to compile where `model` is flex_attention or its mask builder."""
    if isinstance(model, functools.partial):
        inside = _flex_inside(model.func)
        return inside and functools.partial(inside, *model.args, **model.keywords)
    if getattr(model, "__module__", "") != "torch.nn.attention.flex_attention":
        return None
    return getattr(model, _MARK, model)


def _hold_flex_attention(module, settings, context):
    if _setting(settings, "enabled") != "off":
        return
    import torch

    original = module.flex_attention
    compiled = []

    @functools.wraps(original)
    def flex_attention(query, *args, **kwargs):
        if not query.is_cuda or torch.compiler.is_compiling():
            return original(query, *args, **kwargs)
        if not compiled:
            # From a frame that is not torch's own, so ask for the real one by its mark.
            compiled.append(getattr(torch.compile, "__wrapped__", torch.compile)(original))
        return compiled[0](query, *args, **kwargs)

    setattr(flex_attention, _MARK, original)
    module.flex_attention = flex_attention
    context.receipt(_HOOK, contract.APPLIED, part="flex_attention")


# autotune and cudagraphs


def _hold_inductor(module, settings, context):
    import inspect

    original = module.compile_fx
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile_fx(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        inner = bound.arguments["inner_compile"]
        if hasattr(inner, _MARK):  # compile_fx calling itself with its patches in force
            return original(*args, **kwargs)
        policy = _policy(settings, module.config)
        bound.arguments["inner_compile"] = _watched(inner, module.config, context)
        patches = dict(bound.arguments["config_patches"] or {}, **policy)
        bound.arguments["config_patches"] = patches
        with module.config.patch(patches):  # a cached graph is not lowered: read it back here too
            _observe(context, "entry", module.config)
        with _non_lazy_backward(settings):
            return original(*bound.args, **bound.kwargs)

    module.compile_fx = compile_fx
    context.receipt(_HOOK, contract.APPLIED, part="inductor")


def _policy(settings, config):
    """Return inductor's settings for the graph at hand, less those that this torch lacks."""
    policy = {}
    if _setting(settings, "autotune") == "off":
        policy.update(_NO_AUTOTUNE)
    if _graphs_are_off(settings):
        policy.update(_NO_GRAPHS)
    return {key: value for key, value in policy.items() if _has(config, key)}


def _has(config, key):
    try:
        _read(config, key)
    except Exception:
        return False
    return True


def _read(config, key):
    return functools.reduce(getattr, key.split("."), config)


def _watched(inner, config, context):
    """Return `inner` with our mark; it tells the values in force whenever a graph is lowered.

    compile_fx puts its `config_patches` around it, also for a backward that is compiled later.
    """

    @functools.wraps(inner)
    def inner_compile(*args, **kwargs):
        _observe(context, "backward" if kwargs.get("is_backward") else "forward", config)
        return inner(*args, **kwargs)

    setattr(inner_compile, _MARK, True)
    return inner_compile


_observed = []


def _observe(context, graph, config):
    context.activate()
    watched = [key for key in (*_NO_AUTOTUNE, *_NO_GRAPHS) if _has(config, key)]
    effective = {key: _read(config, key) for key in watched}
    entry = (os.getpid(), graph, effective)
    if entry not in _observed:
        _observed.append(entry)
        context.receipt(_HOOK, contract.OBSERVED, graph=graph, effective=effective)


def _hold_launchers(module, settings, context):
    if _setting(settings, "autotune") != "off":
        return
    tuner = getattr(module, "CachingAutotuner", None)
    step = next((n for n in ("_make_launchers", "precompile") if hasattr(tuner, n)), None)
    if step is None:
        context.receipt(_HOOK, contract.NOT_NEEDED, part="launchers", why="no CachingAutotuner")
        return
    original = getattr(tuner, step)

    @functools.wraps(original)
    def one_launcher(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if not getattr(self, "custom_kernel", False):  # a user's own @triton.autotune is theirs
            _keep_first(self)

    setattr(tuner, step, one_launcher)
    context.receipt(_HOOK, contract.APPLIED, part="launchers")


def _keep_first(tuner):
    """Leave one launcher to a kernel, so that there is nothing to time at its first run."""
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


def _hold_cudagraphs_backend(module, settings, context):
    original = getattr(module, "cudagraphs", None)
    if _setting(settings, "cudagraphs") == "keep" or original is None:
        return

    @functools.wraps(original)
    def cudagraphs(model, inputs):
        context.activate()
        off = _graphs_are_off(settings)
        context.receipt(_HOOK, contract.OBSERVED, part="cudagraphs backend", graphs=not off)
        if not off:
            return original(model, inputs)
        from torch._dynamo.backends.registry import lookup_backend

        return lookup_backend("aot_eager")(model, inputs)

    module.cudagraphs = cudagraphs
    context.receipt(_HOOK, contract.APPLIED, part="cudagraphs backend")


# fallback


def _non_lazy_backward(settings):
    # A backward compiled with its forward fails where dynamo can still fall back to eager.
    import contextlib

    config = sys.modules.get("torch._functorch.config")
    if _setting(settings, "fallback", "off") != "on" or config is None:
        return contextlib.nullcontext()
    if not _has(config, "force_non_lazy_backward_lowering"):
        return contextlib.nullcontext()
    return config.patch(force_non_lazy_backward_lowering=True)


def _hold_frames(module, settings, context):
    if _setting(settings, "fallback", "off") != "on":
        return
    original = module.ConvertFrame.__call__
    config = module.config

    @functools.wraps(original)
    def convert(self, *args, **kwargs):
        context.activate()
        config.suppress_errors = True
        return original(self, *args, **kwargs)

    module.ConvertFrame.__call__ = convert
    context.receipt(_HOOK, contract.APPLIED, part="fallback")


# mitigations


def _own_caches(context):
    """Give this rank its own compile caches below the directories that the launcher made.

    The launcher cannot know ranks. A helper of a rank inherits the rank's directory and keeps it.
    """
    rank = os.environ.get("RANK", "")
    if _FRESH_CACHE not in context.mitigations or not rank.isdigit():
        return
    own = {}
    for variable, part in _CACHES.items():
        base = os.environ.get(variable, "")
        tail = os.path.join("rank" + rank, part)
        if base and not base.endswith(os.sep + tail):
            own[variable] = os.path.join(base, tail)
    for path in own.values():
        for folder in (os.path.dirname(path), path):  # the mode is for the last folder only
            os.makedirs(folder, mode=0o700, exist_ok=True)
    os.environ.update(own)
    if own:
        context.receipt(_HOOK, contract.APPLIED, part="caches", effective=own)


def _hold_ddp_optimizer(module, context):
    """Leave the graph whole where DDP would cut it at its buckets, whatever the script assigns.

    Dynamo asks for the setting in CatchErrorsWrapper.__call__, for every frame. The mode
    "python_reducer" is another mechanism, which DDP has set up by then, and stays.
    """
    if _DDP_OPTIMIZER_OFF not in context.mitigations:
        return
    wrapper = getattr(module, "CatchErrorsWrapper", None)
    if wrapper is None:
        context.receipt(_HOOK, contract.NOT_NEEDED, part="ddp optimizer", why="none in this torch")
        return
    original = wrapper.__call__
    config = module.config

    @functools.wraps(original)
    def catch(self, *args, **kwargs):
        if config.optimize_ddp in (True, "ddp_optimizer"):
            config.optimize_ddp = False
            context.activate()
            effective = {"optimize_ddp": config.optimize_ddp}
            context.receipt(_HOOK, contract.OBSERVED, part="ddp optimizer", effective=effective)
        return original(self, *args, **kwargs)

    wrapper.__call__ = catch
    context.receipt(_HOOK, contract.APPLIED, part="ddp optimizer")
