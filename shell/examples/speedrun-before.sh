#!/usr/bin/env bash
# A speedrun as it is often written: one stage after the other, each a plain torchrun. The first
# rank that dies ends it.
#
#     GPUS=8 bash speedrun-before.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

export OMP_NUM_THREADS=1
export NCCL_DEBUG=WARN
gpus=${GPUS:-2}
out=${OUT:-out/speedrun}

torchrun --standalone --nproc_per_node="$gpus" examples/train_gpt.py --steps 100 --out "$out"
torchrun --standalone --nproc_per_node="$gpus" examples/train_gpt.py --steps 200 --out "$out" --resume
