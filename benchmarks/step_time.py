"""Step time of the example under saferun with default hooks, against plain torchrun.

Runs are paired and alternate; the rate of a run is the median over its progress lines, the first
of which (compilation, warm-up) are left out. Prints one row a configuration; bound: 1.005.

    python benchmarks/step_time.py [--pairs 3] [--steps 400] [--gpus 1,2]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
RATE = re.compile(r"^step \d+ loss \S+ ([\d,]+) tokens/s", re.M)
SIZES = {
    "cpu": "--log-every 10",
    "gpu": "--layers 12 --width 768 --heads 12 --block 1024 --batch 16 --lr 6e-4 --log-every 20",
}


def rate(launcher: list[str], ranks: int, argv: list[str], out: str) -> float:
    """Tokens per second of one run."""
    command = [*launcher, "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(ROOT / "examples" / "train_gpt.py"), "--out", out, *argv]
    path = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    rates = [float(text.replace(",", "")) for text in RATE.findall(done.stdout)]
    return statistics.median(rates[3:])


def _on(argv: list[str]) -> str:
    return "on" if argv else "off"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--profile", default="", help="name one; default: detected")
    parser.add_argument("--compile", choices=("off", "on", "both"), default="both")
    arguments = parser.parse_args()
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    size = SIZES["gpu" if gpus else "cpu"]
    argv = [*size.split(), "--steps", str(arguments.steps), "--eval-every", "100000"]
    argv += ["--save-every", "100000"]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    saferun = [sys.executable, "-m", "saferun"]
    saferun += ["--profile", arguments.profile] if arguments.profile else []
    print(f"torch {torch.__version__}, {gpus or 'no'} GPU(s), {arguments.pairs} pairs")
    print("| ranks | compile | torchrun tokens/s | saferun tokens/s | step time ratio | pairs |")
    print("| --- | --- | --- | --- | --- | --- |")
    for ranks in map(int, arguments.ranks.split(",")):
        if gpus and ranks > gpus:
            continue
        for compiled in [w for w in ([], ["--compile"]) if arguments.compile in ("both", _on(w))]:
            plain, ours = [], []
            for pair in range(arguments.pairs):
                sides = [(torchrun, plain), (saferun, ours)]
                for launcher, rates in sides if pair % 2 else sides[::-1]:
                    with tempfile.TemporaryDirectory() as out:
                        rates.append(rate(launcher, ranks, [*argv, *compiled], out))
                print(f"pair {pair}: {plain[-1]:,.0f} {ours[-1]:,.0f}", file=sys.stderr, flush=True)
            ratios = [a / b for a, b in zip(plain, ours, strict=True)]
            print(
                f"| {ranks} | {_on(compiled)} | {statistics.median(plain):,.0f} | "
                f"{statistics.median(ours):,.0f} | {statistics.median(ratios):.4f} | "
                f"{' '.join(f'{r:.3f}' for r in ratios)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
