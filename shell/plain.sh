#!/usr/bin/env bash
#@ header
# shellcheck disable=SC2015,SC2016,SC2030,SC2031,SC2034,SC2064,SC2086,SC2155,SC2329 # A && B || C is meant, as written
set +m +o posix -euo pipefail && shopt -s nullglob
#@ job
[[ ${SAFERUN_DISABLE:-0} == 0 ]] || exec "${JOB[@]}"
default() { [[ -v $1 ]] || export "$1=$2"; } # what you export wins
say() { printf 'saferun: %s\n' "$*" >&2; }
python=$(dirname "$(type -P torchrun || type -P python3)")/python3 && number=0 job='' asked='' text=''
ids=${CUDA_VISIBLE_DEVICES-.*} && ids=${ids// /} && ids=${ids:-none} # numbers, or how UUIDs begin
mapfile -t gpus < <(timeout 20 nvidia-smi --query-gpu=index,uuid --format=csv,noheader 2>/dev/null |
  grep -E "^(${ids//,/|}), |, (${ids//,/|})" | cut -d ' ' -f 2 | sort)
#@ settings
# --- The GPUs: the locks are those of every saferun on this machine, and die with their holder ---
lock() { # FILE FLOCK'S-OPTIONS: in $fd, until this script and all that inherit the lock have ended
  [[ -e $place/$1 ]] || (umask 0 && set -C && : >"$place/$1") 2>/dev/null || true
  [[ -f $place/$1 && ! -L $place/$1 ]] && exec {fd}<"$place/$1" && flock "${@:2}" "$fd" && files+=("$1")
}
lock_gpus() {
  local above=${SAFERUN_LOCKS-} busy='' fd file files=() gate gpu how=-n make start
  for make in 'test -d' 'mkdir -m 1777'; do for place in /run/lock/saferun /tmp/saferun-lock; do
    (umask 0 && $make "$place") 2>/dev/null && break 2
  done; done
  [[ $(stat -c %a "$place") == 1777 ]] || { say "no GPU locks: $place has not the mode 1777" && return; }
  [[ $LOCKS == wait ]] && how="-w $LOCK_WAIT_S" || ! lock admission -x -w 5 || { gate=$fd && files=(); }
  for gpu in "${gpus[@]}"; do for file in "$gpu".{lock,slot0} "$place/$gpu".{slot[1-9]*,slice[s]}; do
    [[ ,${above//[:;]/,}, != *,$gpu,* ]] && ! lock "${file##*/}" -x $how || continue # an ancestor's
    [[ $busy == *$gpu* ]] || say "$gpu is in use by another run (locks.gpus: $LOCKS)"
    [[ $LOCKS == warn ]] && busy+=" $gpu" || exit 75
  done; done
  for gpu in $busy; do for file in "$gpu".slot{0..63}; do ! lock "$file" -x -n || break; done; done # seen by others
  [[ ! -v gate ]] || exec {gate}<&-
  start=$(sed 's/.*) //' "/proc/$$/stat" | cut -d ' ' -f 20) record=$place/holder.$EUID.$$.$RANDOM.json
  export SAFERUN_LOCKS="${SAFERUN_LOCKS:+$SAFERUN_LOCKS;}$$:$start:$(IFS=, && echo "${gpus[*]}")"
  (umask 022 && sed 's/ /","/g' >"$record") <<<"{\"schema\":1,\"pid\":$$,\"start\":$start,\"host\":\"$(uname -n)\",\"user\":\"\",\
\"command\":\"${0//[!a-zA-Z0-9._\/-]/_}\",\"since\":$(date +%s),\"run\":\"\",\"slots\":1,\"devices\":[\"${gpus[*]}\"],\"files\":[\"${files[*]}\"]}"
}
cuda_test() { # every GPU makes a context, computes and reads back
  timeout -k 5 "$PREFLIGHT_S" "$python" -c 'import sys, torch
for n in range(int(sys.argv[1])):
    assert torch.ones(1 << 20, device=f"cuda:{n}").sum().item() == 1 << 20, f"GPU {n} does not compute"' ${#gpus[@]} >&2 && return
  say "a GPU fails its test (preflight.mode: $PREFLIGHT)" && [[ $PREFLIGHT != require ]] || exit 69
}
recover_cuda_context() { # the attempt is gone, and within seconds so is its memory, but for some MiB
  for _ in {1..10}; do ! nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | grep -qE '^[0-9]{4}' || sleep 1; done
  cuda_test
}
# --- An attempt, and what its end means ---
pass_on() { # SIGNAL: to the launcher; Ctrl-C to its group, as from a terminal; a second one kills
  { [[ -z $asked ]] || end_all; } && asked=$1
  [[ $job ]] || exit $((128 + $(kill -l "$1"))) # between attempts
  kill -s "$1" -- "$([[ $1 != INT ]] || echo -)$job" 2>/dev/null || true
}
end_all() { # all that carry this run's mark, those in sessions of their own, too
  for _ in {1..300}; do
    pids=$(grep -lzsx "SAFERUN_PLAIN=$mark" /proc/[0-9]*/environ | tr -dc '0-9\n') || true
    [[ $pids ]] || return 0
    kill -s KILL $pids 2>/dev/null || sleep 0.1
  done
  say "these cannot be killed:" $pids
}
attempt() { # COMMAND...: sets `status`, and `text`, the end of what it wrote to stderr
  local out=1
  [[ ! /dev/fd/1 -ef /dev/fd/2 || -t 1 ]] || out=3 # one file or pipe: the order of lines is kept
  (trap '' HUP INT QUIT TERM && tail -c 65536 <"$tmp/copy" | tr -d '\0' | cat >"$tmp/end") &
  (trap '' HUP INT QUIT TERM && exec tee "$tmp/copy" <"$tmp/out" >&2) &
  tee=$!
  (trap - HUP INT QUIT TERM && exec env SAFERUN_PLAIN="$mark" SAFERUN_ATTEMPT="$number" setsid "$@" \
    3>"$tmp/out" >&$out 2>&3 3>&-) <&0 & # bash would ignore INT in what it starts with `&`
  job=$!
  while kill -0 "$job" 2>/dev/null; do wait "$job" || true; done 2>/dev/null # a signal interrupts it
  status=0 && wait "$job" || status=$?
  job='' && end_all
  until IFS= read -r -d '' -t 10 text || (($? <= 128)); do # tee waits for one without the mark
    [[ $(cut -d ' ' -f 2 "/proc/$tee/syscall") != 0x0 ]] || kill -s KILL "$tee" || true
  done <"$tmp/end"
}
stops() { [[ $verdict ]] || ! why=$(grep -Eim1 -e "$2" <<<"$text") || { verdict=stop kind=$1 advice=$3; }; }
passes() { known+=(-e "$2") && { [[ $verdict ]] || ! why=$(grep -Eim1 -e "$2" <<<"$text") || { verdict=retry kind=$1; }; }; }
judge() { # sets `verdict`, `kind`, `why` and `advice`; what all ranks see of another's end is among `known`
  local known=(-e ChildFailedError) other root=${text##*Root Cause} line='^(\[[^]]*\]:? ?)*[[:alpha:]_][[:alnum:]_.]*(Error|Exception|Interrupt|Exit)(:|$)'
  verdict='' kind='' why='' advice=''
  #@ known
  other=$(grep -E "$line" <<<"$text" | grep -Eiv "${known[@]}" | head -n 1) || true
  if [[ $verdict != stop && $other ]]; then
    verdict=stop kind=exception why=$other advice='Fix the code or the data: the same command would fail again.'
  elif [[ $verdict != stop && "exitcode : -$((status - 128)) $root" =~ exitcode\ *:\ -([0-9]+)\  ]]; then
    kind=signal-${BASH_REMATCH[1]} why='' && [[ $kind =~ -(6|7|9|11|15)$ ]] && verdict=retry || verdict=stop
    [[ $kind != *-9 || $(oom_kills) == "$killed" ]] || verdict=stop advice='The machine ran out of memory: load less at once.'
  fi
}
oom_kills() { grep '^oom_kill ' /proc/vmstat || true; }
# --- The loop ---
tmp=$(mktemp -d) && mkfifo "$tmp"/{out,copy,end} && mark=$tmp
trap 'end_all; kill -s KILL $(jobs -p) 2>/dev/null || true; rm -rf -- "$tmp" ${record-}' EXIT
[[ ${#gpus[@]} -eq 0 || $LOCKS == off ]] || lock_gpus
[[ ${#gpus[@]} -eq 0 || $PREFLIGHT == off ]] || cuda_test
for signal in HUP INT QUIT TERM; do trap "pass_on $signal" "$signal"; done && trap '' USR1 USR2
while [[ -z $asked ]]; do
  killed=$(oom_kills) && ((++number))
  attempt "${JOB[@]}"
  [[ $status -ne 0 && -z $asked ]] || break
  judge
  next="stopped. $advice" wait_s=${WAITS_S[number - 1]-${WAITS_S[-1]-0}}
  ((number >= ATTEMPTS || (DEADLINE_S && SECONDS > DEADLINE_S))) || [[ $verdict != retry ]] || next="attempt $((number + 1)) starts in $wait_s s"
  say "attempt $number failed (status $status): ${kind:-nothing known}; ${why:+$why; }$next"
  [[ $next == attempt* ]] || break
  sleep "$wait_s" &
  wait $! || true
  [[ $kind != cuda-* || ${#gpus[@]} -eq 0 ]] || recover_cuda_context
  ((number > 1)) || JOB+=("${RESUME_ARGS[@]}")
done
[[ $asked != INT ]] || { trap - INT && kill -s INT $$; }
[[ -z $asked || $status -ne 0 ]] || status=$((128 + $(kill -l "$asked")))
exit "$status"
