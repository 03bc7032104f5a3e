def out_of_range(what, values, count, ignored=float("nan")):
    wrong = ((values < 0) | (values >= count)) & (values != ignored)
    if not values.is_floating_point() and wrong.any().item():
        some = ", ".join(map(str, values[wrong].unique()[:5].tolist()))
        return IndexError(f"{what} out of range: {some}; there are {count}: 0 to {count - 1}")

def fail(error):
    raise error

def guard(name, find):
    @hook("torch.nn.functional", name)
    def check(original, given, options):
        torch, call = sys.modules["torch"], signature(original).bind(*given, **options)
        call.apply_defaults()
        inner = torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack()
        is_plain = {type(one) for one in call.args[:2]} <= {torch.Tensor, torch.nn.Parameter}
        on_gpu = is_plain and call.args[0].is_cuda
        reads = not inner and not (on_gpu and torch.cuda.is_current_stream_capturing())
        error = find(**call.arguments) if is_plain and reads else None
        yield fail if error else original, (error,) if error else given, {} if error else options

    vars(check)["__script_if_tracing_wrapper"] = True  # compilers go on with torch's own function
