"""A job of NCCL 2.32 whose collectives fail: `nccl_fails.py FINDING VERSION FAILURE...`.

The receipt that the init hook would write names the NCCL. Where NCCL_RUN_DIAGNOSTICS asks for it,
rank 0 prints what libnccl.so.2 of 2.32.3 prints, as it prints it: by C's stdout. FINDING is what it
finds. Each FAILURE is that of an attempt, "well" for none; the last one stays.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from _saferun.inject.hook_runner import current

finding, version, *failures = sys.argv[1:]
attempt = int(os.environ["SAFERUN_ATTEMPT"])
failure = failures[min(attempt, len(failures)) - 1]
EDGE = (
    "srcRank={0} srcCudaDev={0} srcNvmlDev={0} dstRank={1} dstCudaDev={1} dstNvmlDev={1} "
    "path=NVL handle=CUMEM_POSIX_FD"
)
ADVICE = (
    "check the single-node NVLink topology and peer-access state with 'nvidia-smi topo -m' and "
    "'nvidia-smi topo -p2p n'"
)
WRONG = "expected=0x00000000a5a50001 got=0x0000000000000000 verify=0x0000000000000000"
ONLY = "[INFO] p2p: only {}/2 GPU-to-GPU peer accesses passed verification"
EVERY = "p2p: verified P2P access in both directions between every GPU pair (2 peer accesses)"
IMPORT = "[INFO] p2p: peer-memory import failed"
FINDINGS = {
    "well": [f"[OK]   {EVERY}"],
    "wrong": [f"[INFO] p2p: write mismatch {EDGE.format(0, 1)} {WRONG}; {ADVICE}", ONLY.format(1)],
    "no-import": [
        f"{IMPORT} {EDGE.format(0, 1)} reason=import; {ADVICE}",
        f"{IMPORT} {EDGE.format(1, 0)} reason=import; {ADVICE}",
        ONLY.format(0),
    ],
}
FAILURES = {
    "system": "NCCL Error 2: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "internal": "NCCL Error 3: internal error\nncclInternalError: Internal check failed.",
    "aborts": "NCCL Error 3: internal error\nncclInternalError: Internal check failed.",
}

rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
context = current(os.environ["SAFERUN_INJECT"])
context.receipt("init", "observed", rank=rank, world_size=size, nccl=version)
context.activate()
Path(f"{attempt}-{rank}").touch()
while not all(Path(f"{attempt}-{one}").exists() for one in range(size)):
    time.sleep(0.01)  # as ranks meet in init_process_group
asked = os.environ.get("NCCL_RUN_DIAGNOSTICS")
if rank == 0:
    print(f"attempt {attempt}: asked {asked}", flush=True)
if rank == 0 and asked == "1":
    libc = ctypes.CDLL(None)
    for line in (
        "=== NCCL Diagnostics ===",
        "[OK] net bw: skipped (single host or no network transport)",
        *FINDINGS[finding],
        f"NCCL diagnostics completed in 245.3 ms across {size} ranks",
    ):
        libc.puts(f"node0:{os.getpid()} NCCL DIAG {line}".encode())
if rank and failure != "well":
    signal.pause()  # the launcher ends it
if failure == "aborts":
    print(f"RuntimeError: {FAILURES[failure]}", file=sys.stderr, flush=True)
    os.abort()
if failure != "well":
    raise RuntimeError(FAILURES[failure])
