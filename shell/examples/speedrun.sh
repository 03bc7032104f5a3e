#!/usr/bin/env bash
# The same speedrun under saferun. `torchrun` has become `saferun`, as by
#
#     saferun adopt speedrun-before.sh
#
# and one line names what an attempt after the first adds to the script's arguments.
#
#     GPUS=8 bash speedrun.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

export OMP_NUM_THREADS=1
export NCCL_DEBUG=WARN
export SAFERUN_SET='retry.resume_args=[--resume]'
gpus=${GPUS:-2}
out=${OUT:-out/speedrun}

saferun --standalone --nproc_per_node="$gpus" examples/train_gpt.py --steps 100 --out "$out"
saferun --standalone --nproc_per_node="$gpus" examples/train_gpt.py --steps 200 --out "$out" --resume
