# --- Under Slurm ---------------------------------------------------------------------------------
# sbatch runs this file once, on the job's first node. From there it is sent to every node, in one
# step, and each node runs its part as it would run a job of its own. Their attempts stay together,
# since all nodes meet at the same place whenever they start.

# The job as scontrol names it; one task where it is an array.
slurm_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID-}}
slurm_job=${slurm_job:-${SLURM_JOB_ID-}}

#@ numbers

say() { printf 'saferun: %s\n' "$1" >&2; }

is_safe() ( # PLACE: whether nobody but us and root can put something else in its place
  cd -P -- "$1" 2>/dev/null || exit
  while [[ $(stat -c '%u %A' .) =~ ^(0|$EUID)\ d(....-..-|........[tT]) ]]; do
    [[ ! . -ef / ]] || exit 0
    cd -P .. || exit
  done
  exit 1
)

# Slurm copies this file to the first node only, so the others get it on stdin. Slurm sends its
# signals to every process of a step: this shell does nothing then, and lives on to remove the file.
RECEIVE='
umask 077
trap : HUP INT QUIT TERM USR1 USR2
for place in "${TMPDIR:-/tmp}" /tmp; do is_safe "$place" && break; done &&
  place=$(mktemp -d "$place/saferun-slurm.XXXXXX") && cat >"$place/job.sh" || exit 69
[[ -z $1 ]] || export SAFERUN_VERDICT_FILE="$1/$SLURMD_NODENAME"
status=0
bash "$place/job.sh" --on-node "${@:2}" </dev/null || status=$?
trap "" HUP INT QUIT TERM USR1 USR2
rm -rf -- "$place" # at once: a step that Slurm ends has KillWait in all
trap : HUP INT QUIT TERM USR1 USR2
((status == 0)) || sleep 5 # srun ends the others at once when this one fails: they end by themselves
exit "$status"
'

start_nodes() { # SCRIPT ARGUMENTS...: ends with the status of the step
  local nodes port status=0
  [[ -n $slurm_job ]] || give_up 2 "this script is for Slurm: sbatch $0"
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  ((${#nodes[@]})) || give_up 69 "scontrol does not tell the nodes of \`$SLURM_JOB_NODELIST\`"
  port=$((10000 + SLURM_JOB_ID % 20000)) # below what Linux gives out by itself, one for each job
  verdicts_in "$PWD/saferun-slurm-$SLURM_JOB_ID"
  # Slurm tells the nodes itself; this shell waits for their end. A handler of CONT, which Slurm sends
  # at the same moment, would run first and leave bash's `wait` with the USR2 lost.
  trap : HUP INT QUIT TERM
  trap limit_is_near USR2
  srun --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 --cpu-bind=none \
    ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} \
    --kill-on-bad-exit=1 --wait="$WAIT_S" --open-mode=append --output="$(log_name)" \
    bash -c "$(declare -f is_safe); $RECEIVE" bash "$verdicts" \
    "${nodes[0]}" "$port" "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" "${#nodes[@]}" "$@" <"$0" &
  step=$!
  while kill -0 "$step" 2>/dev/null; do
    wait "$step" || true # a signal interrupts it
  done
  wait "$step" || status=$?
  [[ -z ${timer-} ]] || kill "$timer" 2>/dev/null || true
  ((status == 0)) || after_failure
  [[ -z $verdicts ]] || rm -rf -- "$verdicts"
  exit "$status"
}

log_name() { # of each node's output; %N is the node
  local pattern=$NODE_LOGS
  [[ -z ${SLURM_ARRAY_JOB_ID-} ]] || pattern=${pattern//%j/%A_%a}
  printf '%s' "$pattern"
}

verdicts_in() { # DIRECTORY, which the nodes share; sets `verdicts`
  verdicts=$1
  rm -rf -- "$verdicts"
  mkdir -m 700 "$verdicts" 2>/dev/null && return 0
  say "cannot write in $PWD: a node whose hardware fails will not be left out"
  verdicts=
}

# Slurm's signal before the limit. It goes to this shell alone, and from here as SIGURG to the
# nodes: a signal that only saferun handles there. The ranks' own children would die of USR2.
limit_is_near() {
  [[ -z ${limit_near-} ]] || return 0
  limit_near=yes
  say "the time limit is near: the ranks get SIGUSR2; the job is queued again in $GRACE_S s at most"
  scancel --signal=URG "$slurm_job" || kill -s URG "$step" || true
  trap 'again "it did not end within $GRACE_S s"' USR1
  {
    trap 'kill "$nap" 2>/dev/null' TERM # the sleep would outlive its shell, and hold our output open
    sleep "$GRACE_S" &
    nap=$!
    wait "$nap" && kill -s USR1 "$$"
  } &
  timer=$!
}

# Each node leaves the verdict of its run: `stop-user` where the same command would fail again,
# `stop-hardware` where it would succeed on another node.
after_failure() {
  local file bad=
  for file in ${verdicts:+"$verdicts"/*}; do
    [[ -f $file ]] || continue
    case $(<"$file") in
      stop-user) [[ -n ${limit_near-} ]] || return 0 ;; # else it may be how ranks end once saved
      stop-hardware) bad+=${bad:+,}${file##*/} ;;
    esac
  done
  if [[ -n $bad ]]; then
    again "the hardware of $bad failed" "$bad"
  elif [[ -n ${limit_near-} ]]; then
    again "the time was over"
  fi
}

again() { # REASON [NODES TO LEAVE OUT]: have Slurm run the job once more
  local old=
  [[ -z ${queued-} ]] || return 0
  if ((${SLURM_RESTART_COUNT:-0} + 1 >= $(most_runs))); then
    say "$1; ${SLURM_RESTART_COUNT:-0} times queued again is all there is (retry.attempts_total)"
    return 0
  fi
  trap '' CONT HUP INT TERM # which requeueing sends to this job, this very shell included
  [[ -z ${2-} ]] || old=$(scontrol -o show job "$slurm_job" | grep -oP '(?<= ExcNodeList=)[^ (]+') || true
  if scontrol requeue "$slurm_job"; then
    queued=yes
    say "$1: the job is queued again${2:+, without $2}"
    [[ -z ${2-} ]] || scontrol update "JobId=$slurm_job" "ExcNodeList=${old:+$old,}$2" || true
  else
    say "$1; Slurm does not queue the job again"
  fi
}

most_runs() {
  local at most=$ATTEMPTS_TOTAL
  for ((at = 2; at < ${#saferun_settings[@]}; at += 4)); do
    [[ ${saferun_settings[at]} != retry.attempts_total ]] || most=${saferun_settings[at + 1]}
  done
  echo "$most"
}

# On each node: torchrun's options for the rendezvous. What you give or export for it wins.
meet() { # OPTION VALUE...: sets `meeting`
  local variable
  meeting=()
  while (($#)); do
    variable=${1#--} variable=PET_${variable//-/_}
    [[ -v ${variable^^} ]] || meeting+=("$1" "$2")
    shift 2
  done
}
