#!/usr/bin/env bash
#@ if template
# shellcheck disable=SC2034,SC2329 # no script has all of this
#@ end
#@ header
set -uo pipefail
#@ if slurm

# --- Under Slurm: sbatch runs this once, on the first node; there it starts itself on every node --
# Each node runs its own loop. They agree on nothing but where they meet.
if [[ ! ${on_node-} ]]; then
  export on_node=yes
  first=$(scontrol show hostnames "${SLURM_JOB_NODELIST:?this is for sbatch}" | head -n 1)
  [[ -v PET_NNODES ]] || export PET_NNODES=$SLURM_JOB_NUM_NODES
  [[ -v PET_RDZV_BACKEND ]] || export PET_RDZV_BACKEND=c10d
  [[ -v PET_RDZV_ENDPOINT ]] || export PET_RDZV_ENDPOINT=$first:$((10000 + SLURM_JOB_ID % 20000))
  [[ -v PET_RDZV_ID ]] || export PET_RDZV_ID=$SLURM_JOB_ID-${SLURM_RESTART_COUNT-0}
  asked=''
  trap ':' HUP INT TERM # Slurm tells the nodes itself
  trap 'asked=USR2' USR2
  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    --cpu-bind=none ${SLURM_CPUS_PER_TASK+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} \
    --kill-on-bad-exit=1 --wait=300 --open-mode=append --output=%x-%j-%N.out \
    bash -c "$(<"$0")" "$0" "$@" </dev/null &
  until wait $! && status=0 || status=$? && ! kill -0 $! 2>/dev/null; do # near the limit
    [[ ! $asked ]] || scancel --signal=URG "$SLURM_JOB_ID"
  done
  if [[ $asked ]] && ((status && ${SLURM_RESTART_COUNT-0} < 9)); then
    scontrol requeue "$SLURM_JOB_ID" # near the limit; it goes on from its checkpoint
  fi
  exit "$status"
fi

#@ end
# --- The variables, with their reasons -----------------------------------------------------------
#@ if gpus
gpus=() # those that the job sees, by their locks
while read -r number uuid; do
  seen=,${CUDA_VISIBLE_DEVICES-$number},
  [[ $seen != *,"$number",* && $seen != *,"$uuid",* ]] || gpus+=("$uuid.lock")
done < <(nvidia-smi -L 2>/dev/null | sed -nE 's/^GPU ([0-9]+):.*\(UUID: (GPU-.*)\)/\1 \2/p')
#@ end
#@ settings
job=(torchrun "$@")
#@ if again
attempts=3 wait_s=5 longest_s=60 # seconds until another attempt, doubled each time
#@ end
tmp=$(mktemp -d) asked='' || exit
#@ if hooks
# --- The hooks: every Python of the job loads this file ------------------------------------------
cat >"$tmp/sitecustomize.py" <<'PYTHON'
#@ hooks
PYTHON
export PYTHONPATH=$tmp${PYTHONPATH:+:$PYTHONPATH}

#@ end
#@ if locks
# --- The lock: saferun's own files, held until the last process of the job has ended -------------
{ locks=/run/lock/saferun && [[ -d $locks ]]; } || { locks=/tmp/saferun-lock && [[ -d $locks ]]; } || mkdir -m 1777 "$locks"
#@ if table
lock() { # FILE [-s]: it may be another user's, and is only read
  (umask 0 && set -C && : >"$locks/$1") 2>/dev/null
  [[ -f $locks/$1 ]] && exec {file}<"$locks/$1" || return
  flock -n "${2--x}" "$file" || { exec {file}<&- && return 1; }
}
#@ if slots
slots=1
take() { # GPU.lock: and one of its slots
  for ((slot = 0; slot < slots; slot++)); do lock "${1%.lock}.slot$slot" && break; done
  ((slot < slots)) || return
  mine=$file
  lock "$1" -s || { exec {mine}<&- && return 1; }
}
#@ else
take() { lock "$1"; }
#@ end
#@ end
for gpu in "${gpus[@]:-script-$(readlink -f "$0" | cksum | tr ' ' -).lock}"; do
  #@ if wait
  limit_s=0
  until take "$gpu"; do
    ((SECONDS < limit_s)) || { echo "$0: another run has $locks/$gpu" >&2 && exit 75; }
    sleep 1
  done
  #@ else
  #@ if slots
  take "$gpu" || echo "$0: another run has $locks/$gpu; this one starts beside it" >&2
  #@ else
  (umask 0 && set -C && : >"$locks/$gpu") 2>/dev/null # it may be another user's, and is only read
  { [[ -f $locks/$gpu ]] && exec {file}<"$locks/$gpu" && flock -n "$file"; } ||
    echo "$0: another run has $locks/$gpu; this one starts beside it" >&2
  #@ end
  #@ end
done

#@ end
# --- The run -------------------------------------------------------------------------------------
for name in HUP INT TERM; do eval "trap 'asked=$name' $name"; done
#@ if slurm
trap 'asked=TERM' URG # the limit is near
#@ end
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
#@ if again
copy() { # stdin to stderr, and the end of it to a file
  trap '' HUP INT TERM && exec {alive}>&- && tee >(tail -c 65536 >"$tmp/end" && mv "$tmp/end" "$tmp/$attempt" 2>/dev/null) >&2
}
passing=( # what an error says that may pass (from saferun's knowledge/failures.yaml)
  #@ phrases
)
passes() { # a signal ended torchrun or the first rank (not as it exited), or all errors of the end may pass
  errors=$(grep -E '^(\[rank[0-9]+\]: )?[A-Za-z_.]+(Error|Exception)(: .|$)' "$tmp/$attempt")
  ((status > 128)) || [[ $(sed -n '/terminate called without an active/q; /^Root Cause/,$p' "$tmp/$attempt") == *"Signal "*" (SIG"* ]] && return
  [[ $errors ]] && ! grep -qviE "$(IFS='|' && echo "${passing[*]}")" <<<"$errors"
}
#@ if resume
given() { # OPTION [DEFAULT]: what the arguments say of it
  local word next='' value=${2-}
  for word in "${first[@]}"; do
    [[ ! $next ]] || value=$word
    next=''
    case ${word//_/-} in
      "${1//_/-}") next=yes ;;
      "${1//_/-}="*) value=${word#*=} ;;
    esac
  done
  [[ $value ]] && printf '%s' "$value"
}
newest() { # FILE...: sets `checkpoint` to the one written last, whole or not
  checkpoint=''
  for file; do [[ ! -e $file || $checkpoint -nt $file ]] || checkpoint=$file; done
  #@ if step
  [[ ${checkpoint##*/} =~ ([0-9]+)[^0-9]*$ ]] && step=$((10#${BASH_REMATCH[1]})) # in its name
  #@ end
  [[ $checkpoint ]]
}
first=("${job[@]}")
#@ end
#@ end
coproc { trap '' HUP INT TERM && ! read -r && end_all && rm -rf "$tmp"; } && alive=${COPROC[1]} watcher=$! # after SIGKILL, too
#@ if again
for ((attempt = 1; ; attempt++)); do
  export SAFERUN_ATTEMPT=$attempt
  run "${job[@]}" 2> >(copy)
  until [[ -e $tmp/$attempt ]]; do sleep 0.1; done
  if ((status == 0 || attempt == attempts)) || ! passes; then break; fi
  echo "$0: attempt $((attempt + 1)) of $attempts starts in $wait_s s" >&2
  run sleep "$wait_s"
  #@ if port
  if [[ $errors == *"failed to listen on any"* && "${job[*]}${PET_RDZV_BACKEND-}" != *etcd* ]]; then
    export PET_MASTER_PORT=$((10000 + RANDOM % 20000))
    [[ ${PET_RDZV_ENDPOINT-} != *:[1-9]* ]] || export PET_RDZV_ENDPOINT=${PET_RDZV_ENDPOINT%:*}:$PET_MASTER_PORT
    for ((i = 1; i < ${#job[@]}; i++)); do
      [[ "${job[i - 1]}=${job[i]}" =~ --(master.p|rdzv.e)[a-z]*=(.*:)?[1-9][0-9]*$ ]] &&
        job[i]=${job[i]%"${job[i]##*[!0-9]}"}$PET_MASTER_PORT
    done
    #@ if resume
    first=("${job[@]:0:${#first[@]}}")
    #@ end
  fi
  #@ end
  wait_s=$((2 * wait_s < longest_s ? 2 * wait_s : longest_s))
  #@ again
done
#@ else
run "${job[@]}"
#@ end
exec {alive}>&- && wait "$watcher" && exit "$status"
