"""The incident of h100-nanochat under torchrun, and under the plain script of that profile.

    python benchmarks/plain_autotune.py [--script run.sh]

A model asks for autotuning, and timing a kernel raises "CUDA error: invalid argument"
(timing_fails.py). torchrun must fail and the script must finish, with the
settings off in every graph; the status says whether that was so. Without --script, a script of
`saferun gen-shell --plain --profile h100-nanochat` without a command line, it is made here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = str(ROOT / "benchmarks" / "timing_fails.py")
LINE = ["--standalone", "--nproc-per-node=1", PROGRAM]
MAKE = ["-m", "saferun", "gen-shell", "--plain", "--profile", "h100-nanochat"]


def main() -> int:
    """Run both and report; return 0 where both did as they must."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--script")
    script = parser.parse_args().script
    environ = {**os.environ, "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": "ATEN"}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        if script is None:
            script = str(Path(folder) / "run.sh")
            made = {**environ, "PYTHONPATH": str(ROOT / "src")}
            subprocess.run([sys.executable, *MAKE, "-o", script], env=made, check=True)
        torchrun = ran("torchrun", [sys.executable, "-m", "torch.distributed.run", *LINE], environ)
        plain = ran("the plain script", ["bash", script, *LINE], environ)
    failed = torchrun.returncode != 0 and "CUDA error: invalid argument" in torchrun.stderr
    if plain.returncode:
        print(plain.stderr[-3000:])
        return 1
    seen = json.loads(plain.stdout.splitlines()[-1])
    off = not any(value for graph in seen["graphs"] for value in graph.values())
    print(
        f"{seen['device']}: {len(seen['graphs'])} graphs, all settings off: {off}", seen["graphs"]
    )
    return 0 if failed and off else 1


def ran(name: str, command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    start = time.monotonic()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    error = next((line for line in done.stderr.splitlines() if "CUDA error" in line), "")
    print(f"{name}: status {done.returncode} after {time.monotonic() - start:.1f} s {error}")
    return done


if __name__ == "__main__":
    raise SystemExit(main())
