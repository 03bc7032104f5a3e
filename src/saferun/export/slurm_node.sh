#!/usr/bin/env bash
# What each node of a Slurm job runs: VERDICTS MEETING [ARGUMENTS]... <SCRIPT
# Slurm copies the script to the first node only, so every node gets it on stdin. Slurm sends its
# signals to every process of a step: this shell does nothing then, and lives on to remove the file.
is_safe() ( # PLACE: whether nobody but us and root can put something else in its place
  cd -P -- "$1" 2>/dev/null || exit
  while [[ $(stat -c '%u %A' .) =~ ^(0|$EUID)\ d(....-..-|........[tT]) ]]; do
    [[ ! . -ef / ]] || exit 0
    cd -P .. || exit
  done
  exit 1
)
umask 077
trap : HUP INT QUIT TERM USR1 USR2
for place in "${TMPDIR:-/tmp}" /tmp; do is_safe "$place" && break; done &&
  place=$(mktemp -d "$place/saferun-slurm.XXXXXX") && cat >"$place/job.sh" || exit 69
[[ -z $1 ]] || export SAFERUN_VERDICT_FILE="$1/$SLURMD_NODENAME"
export saferun_slurm_node="$2"
status=0
bash "$place/job.sh" "${@:3}" </dev/null || status=$?
trap "" HUP INT QUIT TERM USR1 USR2
rm -rf -- "$place" # at once: a step that Slurm ends has KillWait in all
trap : HUP INT QUIT TERM USR1 USR2
((status == 0)) || sleep 5 # else srun ends the others at once: they end by themselves
exit "$status"
