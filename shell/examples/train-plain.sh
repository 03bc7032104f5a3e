#!/usr/bin/env bash
# torchrun with the variables and hooks of profile cpu, under a lock, and again where a signal ended
# it or its errors may pass; a script without --plain also says why it failed.
# Of the profile it leaves out hooks.init.timeout_s.
# Made by saferun 1.0.0 with
#     saferun gen-shell --plain --profile cpu --set 'retry.resume_args=[--resume]'
set -uo pipefail
# --- The variables, with their reasons -----------------------------------------------------------
gpus=() # those that the job sees, by their locks
while read -r number uuid; do
  seen=,${CUDA_VISIBLE_DEVICES-$number},
  [[ $seen != *,"$number",* && $seen != *,"$uuid",* ]] || gpus+=("$uuid.lock")
done < <(nvidia-smi -L 2>/dev/null | sed -nE 's/^GPU ([0-9]+):.*\(UUID: (GPU-.*)\)/\1 \2/p')
job=(torchrun "$@")
attempts=3 wait_s=5 longest_s=60 # seconds until another attempt, doubled each time
tmp=$(mktemp -d) asked='' || exit
# --- The lock: saferun's own files, held until the last process of the job has ended -------------
{ locks=/run/lock/saferun && [[ -d $locks ]]; } || { locks=/tmp/saferun-lock && [[ -d $locks ]]; } || mkdir -m 1777 "$locks"
for gpu in "${gpus[@]:-script-$(readlink -f "$0" | cksum | tr ' ' -).lock}"; do
  (umask 0 && set -C && : >"$locks/$gpu") 2>/dev/null # it may be another user's, and is only read
  { [[ -f $locks/$gpu ]] && exec {file}<"$locks/$gpu" && flock -n "$file"; } ||
    echo "$0: another run has $locks/$gpu; this one starts beside it" >&2
done

# --- The run -------------------------------------------------------------------------------------
for name in HUP INT TERM; do eval "trap 'asked=$name' $name"; done
trap '' QUIT USR1 USR2
run() { # COMMAND...: in a session of its own, which gets a signal once, from here; sets `status`
  (trap - HUP INT QUIT TERM USR1 USR2 && started_by=$$ exec setsid "$@" {alive}>&-) <&0 &
  [[ $asked ]] || wait $!
  status=$?
  while [[ $asked ]] && kill -s "$asked" $! 2>/dev/null; do wait $!; done
  end_all
  [[ ! $asked ]] || { trap - "$asked" && exec {alive}>&- && { wait "$watcher" || :; } && kill -s "$asked" $$; }
}
end_all() { # whatever has this script's mark in its environment, however it has detached itself
  while mapfile -t pids < <(grep -lsxz "started_by=$$" /proc/[0-9]*/environ | tr -dc '0-9\n') &&
    ((${#pids[@]})); do kill -KILL "${pids[@]}" 2>/dev/null || :; done
}
copy() { # stdin to stderr, and the end of it to a file
  trap '' HUP INT TERM && exec {alive}>&- && tee >(tail -c 65536 >"$tmp/end" && mv "$tmp/end" "$tmp/$attempt" 2>/dev/null) >&2
}
passing=( # what an error says that may pass (from saferun's knowledge/failures.yaml)
  'connection closed by peer|connection reset by peer|remote process exited or there was a network error|DistNetworkError'                       # peer-lost
  'the client socket has timed out after|the client socket has failed to connect to any network address|connection to the c10d store has failed' # rendezvous-connect-failed
  'unhandled system error'                                                                                                                       # nccl-system-error
  'server socket has failed to listen on any'                                                                                                    # port-in-use
)
passes() { # a signal ended torchrun or the first rank (not as it exited), or all errors of the end may pass
  errors=$(grep -E '^(\[rank[0-9]+\]: )?[A-Za-z_.]+(Error|Exception)(: .|$)' "$tmp/$attempt")
  ((status > 128)) || [[ $(sed -n '/terminate called without an active/q; /^Root Cause/,$p' "$tmp/$attempt") == *"Signal "*" (SIG"* ]] && return
  [[ $errors ]] && ! grep -qviE "$(IFS='|' && echo "${passing[*]}")" <<<"$errors"
}
coproc { trap '' HUP INT TERM && ! read -r && end_all && rm -rf "$tmp"; } && alive=${COPROC[1]} watcher=$! # after SIGKILL, too
for ((attempt = 1; ; attempt++)); do
  export SAFERUN_ATTEMPT=$attempt
  run "${job[@]}" 2> >(copy)
  until [[ -e $tmp/$attempt ]]; do sleep 0.1; done
  if ((status == 0 || attempt == attempts)) || ! passes; then break; fi
  echo "$0: attempt $((attempt + 1)) of $attempts starts in $wait_s s" >&2
  run sleep "$wait_s"
  if [[ $errors == *"failed to listen on any"* && "${job[*]}${PET_RDZV_BACKEND-}" != *etcd* ]]; then
    export PET_MASTER_PORT=$((10000 + RANDOM % 20000))
    [[ ${PET_RDZV_ENDPOINT-} != *:[1-9]* ]] || export PET_RDZV_ENDPOINT=${PET_RDZV_ENDPOINT%:*}:$PET_MASTER_PORT
    for ((i = 1; i < ${#job[@]}; i++)); do
      [[ "${job[i - 1]}=${job[i]}" =~ --(master.p|rdzv.e)[a-z]*=(.*:)?[1-9][0-9]*$ ]] &&
        job[i]=${job[i]%"${job[i]##*[!0-9]}"}$PET_MASTER_PORT
    done
  fi
  wait_s=$((2 * wait_s < longest_s ? 2 * wait_s : longest_s))
  ((attempt > 1)) || job+=(--resume)
done
exec {alive}>&- && wait "$watcher" && exit "$status"
