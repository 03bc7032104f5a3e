import torch  # noqa: F401 - its hooks' context is the one below
from _saferun.inject.hook_runner import current

context = current("")  # the one that the hooks of torch use
context.receipt("test", "applied", n=1)
print(len(context._pending))
context.activate()
context.receipt("test", "observed", odd=object)
