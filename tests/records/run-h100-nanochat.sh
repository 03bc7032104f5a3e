#!/usr/bin/env bash
# A training job under profile h100-nanochat, whose environment fits the GPU. After a failure that
# may be temporary the job starts again, after one that a setting avoids with that setting; after
# any other it stops and says why.
#
#     bash THIS-FILE [SCRIPT'S ARGUMENTS]...
#
# Made by saferun 1.0.0 with
#
#     saferun gen-shell --profile h100-nanochat --set 'env.NOTE=it'"'"'s $HOME' -- -m scripts.base
#
# which makes the same file again; `saferun gen-shell --check THIS-FILE` tells whether it still
# would. Change the settings as you like. It needs bash, python3 (3.10 or later) and torch, and no
# saferun: what it needs of that travels at its end. With --plain it is a short one to commit, which
# does less.
# shellcheck disable=SC2016,SC2329 # a $ in a value is meant; not every word for settings is used

if [ -z "${BASH_VERSION:-}" ]; then
  echo "saferun: this script needs bash: bash $0" >&2
  exit 69
fi
if (return 0 2>/dev/null); then
  echo "saferun: run this script, do not source it: bash ${BASH_SOURCE[0]}" >&2
  return 2
fi
set -euo pipefail
# Where stderr is closed bash leaves this very file in its place.
[[ ! /dev/fd/2 -ef ${BASH_SOURCE[0]:-} ]] || exec 2>/dev/null
give_up() { # STATUS MESSAGE
  printf 'saferun: %s\n' "$2" >&2
  exit "$1"
}

# --- Settings ------------------------------------------------------------------------------------
# What you export wins over export_default, and lists are merged item by item; export_always wins
# over what you export. `when` is decided where the job runs. SAFERUN_SET='KEY=VALUE …' in the
# environment changes any of them for one run. A mitigation after a failure wins over all of them.

saferun_from='' saferun_when=''
saferun_settings=() # four words each: where from, under which conditions, the key, the value
setting() { saferun_settings+=("$saferun_from" "$saferun_when" "$1" "$2"); }
export_default() { setting "env.$1" "$2"; }
export_always() { setting "env.$1" "$2"; }
torchrun_default() { setting "torchrun.$1" "$2"; }
from() { saferun_from=$1; }
when() { # CONDITION SETTING...
  local saferun_when="$saferun_when $1"
  "${@:2}"
}
profile() { # NAME WHO-CHOSE-IT
  setting profile "$1"
  setting chosen "$2"
}
made_for() { # GPU...: where the job would see others, a line says so
  while (($#)); do setting made-for "$1" && shift; done
}

job() { saferun_job=("$@"); }

profile h100-nanochat --profile
made_for H100 GH200

from profiles/cuda.yaml

# One process for each visible GPU, where you name the profile and give no count yourself.
# https://docs.pytorch.org/docs/stable/elastic/run.html
torchrun_default nproc-per-node gpu

# A node imports torch once: 8 ranks on an H200's host made their first step in 0.83 of torchrun's
# time. All 58 programs that were compared print the same as under `spawn`.
# measured: benchmarks/RESULTS.md
when named=true when 'attempts>1' setting start.ranks warm

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

# --- The job -------------------------------------------------------------------------------------
# What this script is given follows the script's own arguments.

job torchrun -m scripts.base "$@"

# --- The hand-over -------------------------------------------------------------------------------
# From here on saferun's own code decides and acts, as it does where saferun is installed. It stands
# packed at the end of this file, and is unpacked into a private directory while the run lasts.

[[ ${saferun_job[0]} == torchrun ]] ||
  give_up 2 "the job begins with the word torchrun, not with \`${saferun_job[0]}\`"
if [[ ${SAFERUN_DISABLE:-0} != 0 && -z ${saferun_slurm-} ]]; then
  type -P torchrun >/dev/null || saferun_job=(python3 -m torch.distributed.run "${saferun_job[@]:1}")
  exec "${saferun_job[@]}"
fi
[[ -f ${BASH_SOURCE[0]:-} ]] || give_up 69 "this script reads its own file: save it, and run that"

interpreter() { # torchrun's own, else the one on PATH: torch may have an older one than 3.10
  local torchrun line='' recent='import sys; sys.exit(sys.version_info < (3, 10))'
  torchrun=$(type -P torchrun) && {
    IFS= read -r line && { [[ $line != '#!/bin/sh' ]] || IFS= read -r line; }
  } 2>/dev/null <"$torchrun" || true
  line=${line#\#!} line=${line#"'''exec' "} # as pip writes it where the path has blanks or is long
  case $line in
    \"*) line=${line#?} line=${line%%\"*} ;;
    \'*) line=${line#?} line=${line%%\'*} ;;
    *) line=${line%% *} ;;
  esac
  if [[ $line == */python* ]] && "$line" -I -S -c "$recent" 2>/dev/null; then
    echo "$line"
  else
    type -P python3 || give_up 69 "there is no python3 on PATH; put one there"
  fi
}

saferun_unpack='
import sys
if sys.version_info < (3, 10):
    version = sys.version.split()[0]
    sys.stderr.write("saferun: this script needs Python 3.10 or later; %s is %s\n" % (sys.executable, version))
    sys.exit(69)
import base64, bz2
with open(sys.argv[1], "rb") as script:
    packed = next(line[3:].rstrip() for line in script if line.startswith(b"#: "))
exec(bz2.decompress(base64.b85decode(packed)))'

saferun_python=$(interpreter) || exit
trap : QUIT USR1 USR2 # Slurm sends them to every process; they end nothing
saferun_kit=$(trap '' QUIT USR1 USR2 && exec "$saferun_python" -I -c "$saferun_unpack" \
  "${BASH_SOURCE[0]}" "$$") || exit
(umask 077 && printf '%s\0' "${saferun_settings[@]}" >"$saferun_kit/settings")
exec "$saferun_python" "$saferun_kit" "${0##*/}" "${saferun_job[@]:1}"

# --- The kit, packed: there is nothing to read below ---------------------------------------------
