off = {}  # what holds while inductor compiles, a later backward included, whatever is asked for

@hook("torch._inductor.compile_fx", "compile_fx")
def hold(original, given, options):
    call, torch = signature(original).bind(*given, **options).arguments, sys.modules["torch"]
    inner = call.get("inner_compile") or torch._inductor.compile_fx.compile_fx_inner
    with torch._inductor.config.patch(off):
        yield original, (), {**call, "inner_compile": torch._inductor.config.patch(off)(inner)}
