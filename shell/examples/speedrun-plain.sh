#!/usr/bin/env bash
# The same speedrun where saferun is not installed. `torchrun` has become `bash train-plain.sh`, a
# script to read and commit, which
#
#     saferun gen-shell --plain --profile cpu --set 'retry.resume_args=[--resume]' -o train-plain.sh
#
# made; for eight GPUs name the profile of yours.
#
#     GPUS=8 bash speedrun-plain.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

export OMP_NUM_THREADS=1
export NCCL_DEBUG=WARN
train=shell/examples/train-plain.sh
gpus=${GPUS:-2}
out=${OUT:-out/speedrun}

bash "$train" --standalone --nproc_per_node="$gpus" examples/train_gpt.py --steps 100 --out "$out"
bash "$train" --standalone --nproc_per_node="$gpus" examples/train_gpt.py --steps 200 --out "$out" --resume
