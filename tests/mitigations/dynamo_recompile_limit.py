"""A function that is compiled anew for every word, where the limit is said to be an error."""

import torch
from once import healthy

torch._dynamo.config.fail_on_recompile_limit_hit = not healthy()


@torch.compile(backend="eager")
def scaled(x, word):
    return x * len(word)


total = sum(float(scaled(torch.ones(1), "a" * n)) for n in range(20))
print(f"sum {total:.0f}", flush=True)
