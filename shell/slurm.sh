# --- Under Slurm ---------------------------------------------------------------------------------
# sbatch runs this file once, on the job's first node. From there it is sent to every node, in one
# step, and each node runs its part as it would run a job of its own. Their attempts stay together,
# since all nodes meet at the same place whenever they start: torchrun gets the options for that,
# and what you give or export for it wins.

slurm() { setting "slurm.$1" "$2" && saferun_slurm=yes; }
slurm script "${BASH_SOURCE[0]}"
for argument; do slurm argument "$argument"; done
#@ numbers
