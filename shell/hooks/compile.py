@hook("torch", "compile")
def leave_eager(original, given, options):
    torch, caller = sys.modules["torch"], sys._getframe(3).f_globals.get("__name__", "")
    model = given[0] if given else options.pop("model", None)
    if caller.startswith("torch.") and caller != "torch.nn.modules.module":
        yield original, (model,), options  # torch compiles small functions of its own
    elif model is None:  # a decorator with arguments
        yield functools.partial, (torch.compile,), options
    else:
        yield torch._dynamo.disable, (model,), {}
