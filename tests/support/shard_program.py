"""A program that trains on what a loader gives, and whether `shards` should warn of it.

A body stands between HEAD and TAIL, which trains on what `loader` gives. A faulty program has the
mark `# here` at the line that a warning should name.
"""

from functools import partial
from typing import NamedTuple

from repo import source

HEAD = source("inject/data_for_ranks")
TAIL = """
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for epoch in range(2):
    for batch in loader:
        batch = batch[0] if isinstance(batch, (list, tuple)) else batch
        optimizer.zero_grad(); net(batch.float().reshape(-1, 4)).sum().backward(); optimizer.step()
"""
END = """
print("done", flush=True)
store = dist.distributed_c10d._get_default_store()
store.set(f"end{rank}", "")
store.wait([f"end{one}" for one in range(size)])
"""
AFTER = "\nimport torch.distributed as dist\nrank, size = dist.get_rank(), dist.get_world_size()\n"


class Program(NamedTuple):
    """One program. `known` says why an answer that is not the right one is expected."""

    shape: str
    case: str
    body: str
    warns: bool  # the ranks train on the same data, and it is not meant
    known: str = ""
    ranks: int = 2
    needs: str = ""  # a package
    whole: bool = False  # it has its own training loop

    def text(self) -> str:
        """Return the whole script."""
        return self.body + AFTER + END if self.whole else HEAD + self.body + TAIL + END


same = partial(Program, warns=True)  # its ranks train on the same data by mistake
fine = partial(Program, warns=False)  # as it is meant
