"""torchrun of one node that meets, as for several, and in which a function of ours has a fault.

    faulty_agent.py FUNCTION DIRECTORY TORCHRUN ARGUMENTS...

FUNCTION is "module.Class.function" of saferun.inject; "close" is a host of the
rendezvous that does not answer any more while it is closed.
"""

import importlib
import json
import os
import sys
import threading

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.run import main

from saferun.inject.node import node_agent


def fault(*args, **kwargs):
    raise LookupError("planted")


function, directory, *arguments = sys.argv[1:]
if function == "close":
    DynamicRendezvousHandler.shutdown = lambda handler: threading.Event().wait()
else:
    module, *names, last = function.split(".")
    target = importlib.import_module(f"saferun.inject.node.{module}")
    for name in names:
        target = getattr(target, name)
    setattr(target, last, fault)
facts = {"host": "h0", "attempt": 1, "mitigations": [], "report": None}
facts.update(saferun="1", torch="2", nnodes="1", script="job.py")
given = {"facts": facts, "directory": directory, "rejoin_s": 60}
os.environ[node_agent.VARIABLE] = json.dumps(given)
node_agent.start(lambda: None)
main(arguments)
