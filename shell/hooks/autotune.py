off.update(dict.fromkeys(("max_autotune", "max_autotune_gemm", "max_autotune_pointwise"), False))
off.update({"coordinate_descent_tuning": False, "triton.autotune_pointwise": False})

@hook("torch._inductor.runtime.triton_heuristics", "CachingAutotuner.autotune_to_one_config")
def time_nothing(original, given, options):
    if not getattr(given[0], "custom_kernel", False):  # but @triton.autotune in the script stays
        del given[0].launchers[1:]
        original, given, options = int, (), {}
    yield original, given, options
