#!/usr/bin/env bash
#@ header
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

#@ settings

# --- The job -------------------------------------------------------------------------------------
#@ job

job torchrun "$@"

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
#@ kit
