#!/usr/bin/env bash
# The long run without a retry loop: saferun tells a crash from a mistake, changes the setting that
# avoids a known failure, leaves no process behind and says why it stopped.
#
#     GPUS=8 bash run1000.sh
#
# The same words make a script for a machine without saferun:
#
#     saferun gen-shell --set 'retry.resume_args=[--resume]' --retries 19 -- \
#       --standalone --nproc_per_node=8 examples/train_gpt.py --steps 1000 --save-every 50 > run.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

exec saferun --set 'retry.resume_args=[--resume]' --retries 19 \
  --standalone --nproc_per_node="${GPUS:-2}" examples/train_gpt.py \
  --steps 1000 --save-every 50 --out "${OUT:-out/run1000}"
