#!/usr/bin/env bash
# A training job under profile h100-nanochat, and it survives: the environment fits the GPU, what
# can pass is tried again, what a setting avoids is tried again with it, and the rest is explained.
#
#     bash THIS-FILE [SCRIPT'S ARGUMENTS]...
#
# Made by saferun 1.0.0 with
#
#     saferun gen-shell --profile h100-nanochat --set 'env.NOTE=it'"'"'s $HOME' -- -m scripts.base
#
# which makes the same file again; `saferun gen-shell --check THIS-FILE` tells whether it still
# would. Read it from here down to the job; change the settings as you like. It needs bash 4.2,
# coreutils, python3 (3.10 or later) and torch, and no saferun: what it needs of that travels at its
# end.
# shellcheck disable=SC2016,SC2329 # a $ in a value is meant; not every word for settings is used

# --- What this needs -----------------------------------------------------------------------------

if [ -z "${BASH_VERSION:-}" ]; then
  echo "saferun: this script needs bash: bash $0" >&2
  exit 69
fi
if (return 0 2>/dev/null); then
  echo "saferun: run this script, do not source it: bash ${BASH_SOURCE[0]}" >&2
  return 2
fi

need_bash() { # MAJOR MINOR
  if [ "$1" -lt 4 ] || { [ "$1" -eq 4 ] && [ "$2" -lt 2 ]; }; then
    echo "saferun: this script needs bash 4.2 or later, and this is bash $1.$2" >&2
    exit 69
  fi
}
need_bash "${BASH_VERSINFO[0]}" "${BASH_VERSINFO[1]}"

# Not posix, which `sh` is where that is bash, and POSIXLY_CORRECT: `wait` would forget how the job
# ended. Nor monitor, from an exported SHELLOPTS: the terminal's keys would not reach the job.
set +m +o posix
set -euo pipefail

# Where stderr is closed bash leaves this very file in its place.
[[ ! /dev/fd/2 -ef ${BASH_SOURCE[0]:-} ]] || exec 2>/dev/null

# The names that this script itself uses; where you export one, the job still gets yours.
OWN=(asked conditions delay_s foreground gpu group job kit line number orders origin place python
  self signal stat status step told verdicts SETTINGS UNPACK)
unset "${OWN[@]}"

say() { printf 'saferun: %s\n' "$1" >&2; }
give_up() { # STATUS LINE
  say "$2"
  exit "$1"
}

# --- Settings ------------------------------------------------------------------------------------
# What you export wins over export_default, and lists are merged item by item; export_always wins
# over what you export. `when` is decided where the job runs. SAFERUN_SET='KEY=VALUE …' in the
# environment changes any of them for one run. A mitigation after a failure wins over all of them.

SETTINGS=() # four words each: where from, under which conditions, the key, the value
setting() { SETTINGS+=("${origin-}" "${conditions-}" "$1" "$2"); }
export_default() { setting "env.$1" "$2"; }
export_always() { setting "env.$1" "$2"; }
torchrun_default() { setting "torchrun.$1" "$2"; }
from() { origin=$1; }
when() { # CONDITION SETTING...
  local conditions="${conditions-} $1"
  shift
  "$@"
}
profile() { # NAME WHO-CHOSE-IT
  setting profile "$1"
  setting chosen "$2"
}
made_for() { # GPU...: where the job would see others, a line says so
  local gpu
  for gpu; do setting made-for "$gpu"; done
}

profile h100-nanochat --profile
made_for H100 GH200

from profiles/cuda.yaml

# One process for each visible GPU, where you name the profile and give no count yourself.
# https://docs.pytorch.org/docs/stable/elastic/run.html
torchrun_default nproc-per-node gpu

# GPU numbers in the job are those of nvidia-smi; CUDA's own order puts the fastest GPU first. It
# costs nothing.
# https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html
export_default CUDA_DEVICE_ORDER PCI_BUS_ID

# Turning torch.compile off raised a GPT-2 124M step from 33.7 to 50.0 ms (a third of the
# throughput) and its memory from 8.4 to 16.1 GiB on an H200. It waits for a failure.
# measured: benchmarks/RESULTS.md
setting hooks.compile.enabled keep

# Markers tell CUDA graphs where a step begins, so that its outputs are not overwritten early. DDP
# with torch.compile and markers ran without fault on H200s, so they are no danger there.
# https://docs.pytorch.org/docs/stable/generated/torch.compiler.cudagraph_mark_step_begin.html
# measured: benchmarks/RESULTS.md
setting hooks.cudagraph_markers keep

# Each rank takes its own GPU before NCCL starts; otherwise all of them may open a context on GPU 0,
# or a first barrier may guess the wrong GPU and hang. It costs nothing.
# https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
# https://github.com/pytorch/pytorch/pull/134617
setting hooks.init.set_device true

# Ranks wait for each other through the TCP store, because a first NCCL barrier can hang (before
# torch 2.5) or take a minute (B200).
# https://github.com/pytorch/pytorch/issues/124714
# https://github.com/NVIDIA/nccl/issues/1646
setting hooks.init.barrier store

# torchrun knows a rank's exception only where the script uses @record. Written for every rank, it
# tells the first failure from its echoes, and costs nothing until something fails.
# https://docs.pytorch.org/docs/stable/elastic/errors.html
setting hooks.excepthook on

# A data loader made before the process group exists may give every rank the same data, silently.
# The warning names the line and changes nothing.
# incident: ddp-sigsegv-order-and-markers.md
setting hooks.order.mode warn

from profiles/h100-nanochat.yaml

# A second start reuses compiled graphs: 1.6 s instead of 17.0 s for the first three steps. From
# torch 2.5 on it is the default.
# incident: h100-inductor-autotune-nanochat.md
# measured: benchmarks/RESULTS.md
# https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_tutorial.html
when 'torch<2.5' export_default TORCHINDUCTOR_FX_GRAPH_CACHE 1

# No kernel is benchmarked against another, which is the step that failed, even under
# mode="max-autotune". The incident expects 5 to 15 % slower steps, and the minute or more that
# autotuning took at the start is saved.
# incident: h100-inductor-autotune-nanochat.md
# measured: benchmarks/RESULTS.md
# https://github.com/karpathy/nanochat/issues/257
setting hooks.compile.autotune off

# No CUDA graph is recorded, even under mode="reduce-overhead". It costs only scripts that ask for
# graphs, most where kernels are small.
# incident: h100-inductor-autotune-nanochat.md
setting hooks.compile.cudagraphs off

from --set

export_always NOTE 'it'"'"'s $HOME'

# --- The kit -------------------------------------------------------------------------------------
# This script decides and acts by saferun's own code: the lines at its end, unpacked into a private
# directory for as long as the run lasts.

find_python() { # torchrun's own interpreter, else the one on PATH; sets `python`
  local line=
  python=$(type -P torchrun) && IFS= read -r line 2>/dev/null <"$python" || true
  python=${line#\#!} python=${python%% *}
  if [[ $line == '#!'*/python* && -x $python ]] && recent_enough; then return; fi
  python=$(type -P python3) || give_up 69 "there is no python3 on PATH; put one there"
  recent_enough || give_up 69 "this script needs Python 3.10 or later; $python is $("$python" -V 2>&1)"
}

recent_enough() { "$python" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

is_safe() ( # PLACE: whether nobody but us and root can put something else in its place
  cd -P -- "$1" 2>/dev/null || exit
  while [[ $(stat -c '%u %A' .) =~ ^(0|$EUID)\ d(....-..-|........[tT]) ]]; do
    [[ ! . -ef / ]] || exit 0
    cd -P .. || exit
  done
  exit 1
)

unpack() { # sets `kit`; nothing in it need be executable
  local self=${BASH_SOURCE[0]:-} place signal
  [[ -f $self ]] || give_up 69 "this script reads its own file: save it, and run that"
  kit=
  # Slurm would end this rm, too.
  trap 'trap "" HUP INT QUIT TERM USR1 USR2; rm -rf -- "$kit"' EXIT
  trap : QUIT USR1 USR2          # which end nothing
  for signal in HUP INT TERM; do # untrapped, they would have it removed half-way
    # shellcheck disable=SC2064 # the signal's name is known now
    trap "exit $((128 + $(kill -l "$signal")))" "$signal"
  done
  for place in "${TMPDIR:-/tmp}" "${XDG_RUNTIME_DIR:-}" "${HOME:-}/.cache" /tmp; do
    # A colon would split PYTHONPATH; what root makes in a user's HOME locks the user out.
    [[ $place == /* && $place != *:* && ($place != */.cache || -O ${HOME:-/}) ]] || continue
    [[ -d $place || $place != */.cache ]] || mkdir "$place" 2>/dev/null || continue
    is_safe "$place" || continue
    kit=$(mktemp -d "$place/saferun-kit.XXXXXX" 2>/dev/null) || continue
    (trap '' INT QUIT USR1 USR2 && umask 077 && exec "$python" -I -c "$UNPACK" "$self" "$kit" "$$") && return
    rm -rf -- "$kit"
  done
  give_up 69 "no place for temporary files that is safe from others: \$TMPDIR, \$XDG_RUNTIME_DIR, ~/.cache, /tmp"
}

UNPACK='
import base64, json, os, sys, zlib
script, kit, shell = sys.argv[1:]
with open(script, "rb") as file:
    packed = b"".join(line[3:] for line in file if line.startswith(b"#: "))
files = json.loads(zlib.decompress(base64.b64decode(packed)).decode())
try:
    for name, text in files.items():
        path = os.path.join(kit, name)
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    with open("/proc/" + shell + "/environ", "rb") as old, open(kit + "/environ", "wb") as new:
        new.write(old.read())  # bash itself changes SHLVL and others; the job gets yours
except OSError as error:
    sys.exit("saferun: " + kit + ": " + str(error.strerror))
'

# --- The steps of a run --------------------------------------------------------------------------
# The kit names the next step, and does it at the order `go`. You may extend a step; one that says
# `order skip` is left out.

# Before an attempt: every GPU makes a context and reads memory back. The kit began that when it
# locked the GPUs, and now waits for the result; preflight.mode says what a bad GPU means.
preflight() { order go; }

# Before an attempt: wait, unless a signal ends the run meanwhile, and have torchrun started. Nothing
# is ever written to the pipe while this waits; it closes when the kit ends.
attempt() { # NUMBER SECONDS
  # A signal that came before the kit could handle it is sent again.
  [[ -z ${asked-} ]] || tell "$asked"
  [[ $2 == 0 ]] || read -r -t "$2" -u "$verdicts" || true
  order go
}

# After a failure of CUDA: the kit ends what this run has left on the GPUs, waits until their memory
# is free and, only as root and with recover.gpu_reset: when-idle, resets one that nobody uses.
recover_cuda_context() { order go; }

# --- The run -------------------------------------------------------------------------------------

run() { # torchrun WORDS...
  [[ $1 == torchrun ]] || give_up 2 "the job begins with the word torchrun, not with \`$1\`"
  if [[ ${SAFERUN_DISABLE:-0} != 0 ]]; then
    type -P torchrun >/dev/null || set -- python3 -m torch.distributed.run "${@:2}"
    export_own
    exec "$@"
  fi
  find_python
  unpack
  start "${@:2}"
  while next_step; do
    case $step in
      preflight | recover_cuda_context) "$step" ;;
      attempt) attempt "$number" "$delay_s" ;;
      *) give_up 70 "the kit asked for a step that there is not: $step" ;;
    esac
  done
  finish
}

export_own() { # the variables that this script uses itself, as you had exported them
  local pair own=" OWN ${OWN[*]} POSIXLY_CORRECT "
  while IFS= read -r -d '' pair; do
    [[ $own == *" ${pair%%=*} "* ]] || continue
    unset -v "${pair%%=*}" # an array cannot be exported
    export "${pair?}"
  done <"/proc/$$/environ"
}

# Start the kit's program. It locks the GPUs, as every saferun on this machine does (flock(2) on the
# files in /run/lock/saferun), starts torchrun under a keeper that leaves no process behind, reads
# what the attempt left and decides. Then the next step comes on `verdicts`; or the program ends,
# with the run's exit status.
start() {
  local signal
  (umask 077 && printf '%s\0' "${SETTINGS[@]}" >"$kit/settings")
  mkfifo -m 600 "$kit/verdicts" "$kit/orders"
  exec {told}<>"$kit/verdicts" {orders}<>"$kit/orders"
  for signal in HUP INT QUIT TERM USR1 USR2; do
    # shellcheck disable=SC2064 # the signal's name is known now
    trap "pass_on $signal" "$signal"
  done
  "$python" "$kit" "$$" "$told" "$orders" "${0##*/}" "$@" <&0 &
  job=$!
  exec {verdicts}<"$kit/verdicts" {told}>&- # now the kit alone can write to it
  [[ -z ${asked-} ]] || tell "$asked"
}

pass_on() { # SIGNAL
  [[ $1 == USR? || $1 == QUIT ]] || asked=$1
  # The kit has got the terminal's keys, too; an INT that repeats one of them does nothing there.
  if [[ $1 == QUIT ]] && at_terminal; then return; fi
  [[ -z ${job-} ]] || tell "$1"
}

tell() { kill -s "$1" "$job" 2>/dev/null || true; } # SIGNAL

at_terminal() { # whether its keys are for this process group: proc_pid_stat(5), after the name
  local stat group foreground
  stat=$(<"/proc/$$/stat")
  IFS=' ' read -r _ _ group _ _ foreground _ <<<"${stat##*) }"
  [[ $group == "$foreground" ]]
}

next_step() { # sets `step`, `number` and `delay_s`; fails when the run is over
  local status=0 line=''
  while [[ $line != *' .' ]] && ((status == 0 || status > 128)); do
    IFS= read -r -t 1 -u "$verdicts" step
    status=$? line+=$step # a read that gives up may take the line's end along: a dot ends a step
  done
  IFS=' ' read -r step number delay_s <<<"${line% .}"
  [[ $line == *' .' ]]
}

order() { echo "$1" >&"$orders"; } # go or skip

finish() { # with the job's exit status
  local status=0
  while [[ $(jobs -pr) ]]; do wait "$job" || true; done # a signal interrupts it
  wait "$job" || status=$?
  # A shell that runs this in a loop stops only where this dies of the signal itself.
  if [[ ${asked-} == INT && $status == 130 ]]; then trap - INT && kill -s INT "$$"; fi
  exit "$status"
}

# --- The job -------------------------------------------------------------------------------------
# What this script is given follows the script's own arguments.

run torchrun -m scripts.base "$@"

# --- The kit, packed: there is nothing to read below ---------------------------------------------
