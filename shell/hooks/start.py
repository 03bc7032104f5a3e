# A hook is a generator: it yields the call to make in the place of one of torch's, and goes on
# after that. It takes its place when the module was imported. A fault of ours is one line.
import _frozen_importlib as importing
import functools
import gc
import os
import sys
from datetime import timedelta
from inspect import signature

hooks = {}  # module -> the names in it, each with its hook
several = os.environ.get("WORLD_SIZE", "1") != "1"

def hook(module, name):
    return lambda steps: hooks.setdefault(module, []).append((name, steps)) or steps

def guarded(step, *given):
    try:
        return step(*given)
    except Exception as error:
        sys.stderr.write(f"hook: {type(error).__name__}: {error}\n")

def place(module, name, steps):
    *path, name = name.split(".")
    owner = functools.reduce(getattr, path, module)
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*given, **options):
        made = steps(original, given, options)
        function, given, options = guarded(next, made) or (original, given, options)
        result = function(*given, **options)
        guarded(next, made, None)
        return result

    vars(call).update(vars(steps), __original_fn=original, _torchdynamo_orig_callable=original)
    setattr(owner, name, call)

def find_spec(name, path, target=None, find=importing._find_spec):
    spec = find(name, path, target)
    if spec and name in hooks:
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda m: (run(m), [guarded(place, m, *h) for h in hooks[name]])
    return spec

importing._find_spec = find_spec
