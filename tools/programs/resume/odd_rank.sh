#!/usr/bin/env bash
# Interprets a rank's script (PYTHON_EXEC). From attempt 2 on, the rank ODD_RANK sees other checkpoints
# below ODD_PLACE than the others: none (ODD=hidden), or with the newest large file cut (ODD=cut).
set -euo pipefail
if [[ $RANK != "$ODD_RANK" || $SAFERUN_ATTEMPT == 1 ]]; then
  exec "$ODD_PYTHON" "$@"
fi
if [[ -z ${ODD_MOUNTED:-} ]]; then
  ODD_MOUNTED=1 exec unshare --mount --propagation private "$0" "$@"
fi
for folder in "$ODD_PLACE"/{out,base_checkpoints}; do
  [[ -d $folder ]] || continue
  seen=$(mktemp -d)
  mount -t tmpfs tmpfs "$seen"
  if [[ $ODD == cut ]]; then
    cp -a "$folder/." "$seen"
    newest=$(find "$seen" -type f -size +8k -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d ' ' -f 2-)
    [[ -z $newest ]] || truncate -s "$(($(stat -c %s "$newest") / 2))" "$newest"
  fi
  mount --bind "$seen" "$folder"
done
exec "$ODD_PYTHON" "$@"
