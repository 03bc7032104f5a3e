#!/usr/bin/env bash
#@ header
set -uo pipefail

#@ settings
# torchrun ends with status 1 whatever ended its ranks; here it ends with 3 where a signal ended the
# first rank that failed.
torchrun='import sys
sys.argv[0], sys.path = "torchrun", [place for place in sys.path if place]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
try:
    main()
except ChildFailedError as error:
    sys.excepthook(*sys.exc_info())
    sys.exit(3 if error.get_first_failure()[1].exitcode < 0 else 1)'
job=(python3 -c "$torchrun" "$@")
attempts=3 wait_s=5 longest_s=60 asked=''
trap 'asked=HUP' HUP
trap 'asked=INT' INT
trap 'asked=TERM' TERM
trap '' QUIT USR1 USR2

run() { # COMMAND...: in a session of its own, which gets a signal once, from here; sets `status`
  (trap - HUP INT QUIT TERM USR1 USR2 && exec setsid "$@") <&0 &
  [[ $asked ]] || wait $!
  status=$?
  [[ $asked ]] || return 0
  while kill -s "$asked" $! 2>/dev/null; do wait $!; done
  trap - "$asked" && kill -s "$asked" $$
}

for ((attempt = 1; ; attempt++)); do
  run "${job[@]}"
  ((status == 3 && attempt < attempts)) || exit "$status"
  echo "$0: a signal ended a rank; attempt $((attempt + 1)) of $attempts starts in $wait_s s" >&2
  run sleep "$wait_s"
  wait_s=$((2 * wait_s < longest_s ? 2 * wait_s : longest_s))
  #@ resume
done
