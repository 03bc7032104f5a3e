"""Write down what a program can see of its start, to be compared between two starts.

It is a rank, or a job of plain python that dies in its first attempt.
"""

import atexit
import gc
import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path

RANK = os.environ.get("RANK", "0")
AT_START = {  # before any import of the script's own
    "argv": list(sys.argv),
    "orig_argv": list(sys.orig_argv),
    "flags": str(sys.flags),
    "path": list(sys.path),
    "warnoptions": list(sys.warnoptions),
    "xoptions": dict(sys._xoptions),
    "main": {
        name: repr(value)
        for name, value in globals().items()
        if name.startswith("__") and name not in ("__builtins__", "__loader__")
    },
    "loader": type(__loader__).__name__,
    "loader_path": getattr(__loader__, "path", None),
    "excepthook": getattr(sys.excepthook, "__qualname__", repr(sys.excepthook)),
}


def stream(file):
    raw = file.buffer
    return {
        "type": type(file).__name__,
        "buffer": type(raw).__name__,
        "raw_name": str(getattr(raw, "name", None)),
        "mode": file.mode,
        "encoding": file.encoding,
        "errors": file.errors,
        "newlines": repr(file.newlines),
        "line_buffering": file.line_buffering,
        "write_through": file.write_through,
        "fileno": file.fileno(),
        "isatty": file.isatty(),
        "same": file is getattr(sys, f"__{file.name.strip('<>')}__"),
        "name": file.name,
    }


def descriptors():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if not target.startswith("/proc/"):
            found[name] = target.split(":")[0] if ":" in target else target
    return found


def disposition(number):
    handler = signal.getsignal(number)
    return getattr(handler, "__name__", repr(handler))


def limits():
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


class OfMain:
    """A class to be pickled."""


def late():
    """What takes an import to find out."""
    import inspect
    import logging
    import pickle
    import random
    import secrets
    import tempfile
    import traceback
    import uuid

    import numpy
    import torch

    try:
        raise ValueError("x")
    except ValueError:
        trace = traceback.format_exc()
    alike = {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "cuda": torch.cuda.is_initialized(),
        "bad_fork": torch.cuda._is_in_bad_fork(),
        "default_dtype": str(torch.get_default_dtype()),
        "source": inspect.getsource(OfMain),
        "pickled": pickle.loads(pickle.dumps(OfMain)) is OfMain,
        "trace": trace,
        "root_handlers": len(logging.getLogger().handlers),
        "root_level": logging.getLogger().level,
        "print_options": str(torch._tensor_str.PRINT_OPTS),
        "comm": Path("/proc/self/comm").read_text(encoding="utf-8").strip(),
        "importers": sorted(
            path for path in sys.path_importer_cache if "site-packages" not in path
        ),
    }
    different = {
        "random": random.random(),
        "torch_seed": torch.initial_seed(),
        "numpy": numpy.random.rand(),
        "secrets": secrets.token_hex(4),
        "uuid": str(uuid.uuid4()),
        "temp": tempfile.mktemp(),
        "authkey": __import__("multiprocessing").current_process().authkey.hex(),
    }
    return alike, different


def main():
    status = dict(
        line.split(":\t", 1)
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    )
    environ = {
        name: value
        for name, value in os.environ.items()
        if name
        not in (
            "SAFERUN_START",
            "SAFERUN_RANK_PID",
            "SAFERUN_MAIN_PID",
            "SAFERUN_AGENT_PID",
            "MASTER_PORT",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_ERROR_FILE",
            "SAFERUN_INJECT",
            "SAFERUN_NODES",
        )
    }
    native = {name.decode(): value.decode() for name, value in os.environb.items()}
    facts = {
        **AT_START,
        "environ": environ,
        "native_environ": native == dict(os.environ),
        "cwd": os.getcwd(),
        "umask": [os.umask(0o22), os.umask(0o22)][1],
        "limits": limits(),
        "signals": {int(n): disposition(n) for n in sorted(signal.valid_signals())},
        "blocked": status["SigBlk"],
        "ignored": int(status["SigIgn"], 16) & ~(1 << 32),  # glibc's own SIGSETXID
        "session": os.getsid(0) == os.getpid(),
        "group": os.getpgrp() == os.getpid(),
        "parent": Path(f"/proc/{os.getppid()}/comm").read_text(encoding="utf-8"),
        "is_agents_child": os.environ.get("SAFERUN_AGENT_PID", "").split()[:1]
        == [str(os.getppid())],
        "nice": os.nice(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "oom": Path("/proc/self/oom_score_adj").read_text(encoding="utf-8"),
        "streams": [stream(file) for file in (sys.stdout, sys.stderr)],
        "stdin": [type(sys.stdin.buffer).__name__, sys.stdin.encoding, sys.stdin.errors],
        "descriptors": descriptors(),
        "threads": [thread.name for thread in threading.enumerate()],
        "native_id": threading.main_thread().native_id == os.getpid(),
        "main_thread": threading.current_thread() is threading.main_thread(),
        "gc": [gc.isenabled(), gc.get_threshold()],
        "cmdline": Path("/proc/self/cmdline")
        .read_text(encoding="utf-8")
        .rstrip("\0")
        .split("\0")[-2:],
        "rank_in_proc": f"RANK={RANK}"
        in Path("/proc/self/environ").read_text(encoding="utf-8").split("\0"),
        "dumpable": status.get("CoreDumping"),
        "no_new_privs": status.get("NoNewPrivs"),
    }
    alike, different = late()
    facts["late"] = alike
    with open(f"{os.environ['FACTS']}-{RANK}", "w", encoding="utf-8") as file:
        json.dump({"alike": facts, "different": different}, file)
    atexit.register(lambda: sys.stdout.write(f"at exit {RANK}\n"))
    if "WAY" in os.environ and not {"LEARN", "RANK"} & os.environ.keys():
        import successor

        successor.die()


if __name__ == "__main__":
    main()
