@hook("torch", "compile")
def leave_eager(original, given, options):
    torch, caller = sys.modules["torch"], sys._getframe(3).f_globals.get("__name__", "")
    model = given[0] if given else options.pop("model", None)
    if model is None or (caller.startswith("torch.") and caller != "torch.nn.modules.module"):
        yield original, (model,), options  # to make a decorator, or small functions of torch's own
    else:
        yield torch._dynamo.disable, (model,), {}
