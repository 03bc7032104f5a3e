#!/usr/bin/env bash
# The long run without a loop of its own: saferun's tells a crash from a mistake, changes what cures
# a failure, leaves no process behind and explains the rest.
#
#     GPUS=8 bash run1000.sh
#
# For a machine without saferun the same line makes a script to take along:
#
#     saferun gen-shell --set 'retry.resume_args=[--resume]' --retries 19 -- \
#       --standalone --nproc_per_node=8 examples/train_gpt.py --steps 1000 --save-every 50 > run.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

exec saferun --set 'retry.resume_args=[--resume]' --retries 19 \
  --standalone --nproc_per_node="${GPUS:-2}" examples/train_gpt.py \
  --steps 1000 --save-every 50 --out "${OUT:-out/run1000}"
