#!/usr/bin/env bash
# A long run with a retry loop around torchrun, as people add one after the first lost night. It
# starts again whatever failed: a typo in the script fails until the attempts are used up, a failure
# that needs another setting comes back, and ranks that torchrun left behind still hold the GPUs.
#
#     GPUS=8 bash run1000-before.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

gpus=${GPUS:-2}
out=${OUT:-out/run1000}
resume=()

for attempt in {1..20}; do
  torchrun --standalone --nproc_per_node="$gpus" examples/train_gpt.py \
    --steps 1000 --save-every 50 --out "$out" ${resume[@]+"${resume[@]}"} && exit
  echo "attempt $attempt failed, once more in 30 s" >&2
  sleep "${PAUSE:-30}"
  resume=(--resume)
done
exit 1
