off = {}  # what holds while inductor compiles, a later backward included, whatever is asked for

@hook("torch._inductor.compile_fx", "compile_fx")
@hook("torch._inductor.compile_fx", "_compile_fx_inner")
def hold(original, given, options):
    with sys.modules["torch._inductor.config"].patch(off):
        yield original, given, options
