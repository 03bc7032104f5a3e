"""A Slurm cluster of three nodes on this machine, in namespaces of its own.

Everything runs in one PID namespace, whose end the kernel makes the end of all: munged, slurmctld,
the slurmds and whatever jobs have started. The network is the cluster's own, too, so that no port
is taken; each node has a host name of its own and sees no other's spool directory, where the job's
script lies.

The configuration follows Slurm's own manual pages: slurm.conf(5), gres.conf(5), `slurmd -N`.
"""

import contextlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from helpers import until
from sandbox import text_of, write

NODES = ("n1", "n2", "n3")
GPUS = 2  # of each node; devices that only look like some
UP_S = 30
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "nsenter", "ip")

CONF = """\
ClusterName=t
SlurmctldHost=ctl
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/mnt/socket
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool.%n
SlurmctldPidFile={place}/ctld.pid
SlurmdPidFile={place}/slurmd.%n.pid
SlurmctldLogFile={place}/log/ctld.log
SlurmdLogFile={place}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=0
ReturnToService=1
KillWait=10
MpiDefault=none
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=n[1-3] NodeAddr=10.77.0.1 Port=[17001-17003] CPUs=4 CoresPerSocket=4 RealMemory=4000 \
Gres=gpu:2
PartitionName=p Nodes=n[1-3] Default=YES MaxTime=60 State=UP PriorityTier=1
PartitionName=urgent Nodes=n[1-3] MaxTime=60 State=UP PriorityTier=9
"""
GRES = "NodeName=n[1-3] Name=gpu File={place}/dev/nvidia[0-1]\n"

# As the namespace's first process: whoever reads this script's stdin ends it, and all with it.
INIT = r"""
set -eu
mount --make-rprivate /
hostname ctl
ip link add eth0 type veth peer name eth1
ip addr add 10.77.0.1/24 dev eth0
for link in lo eth0 eth1; do ip link set $link up; done
mount --bind "$D/hosts" /etc/hosts
mount -t tmpfs -o mode=755 tmpfs /mnt
head -c 1024 /dev/urandom >/mnt/key
chown -R munge: /mnt
chmod 600 /mnt/key
runuser -u munge -- munged --foreground --socket /mnt/socket --key-file /mnt/key \
  --pid-file /mnt/pid --log-file /mnt/log --seed-file /mnt/seed </dev/null >"$D/log/munged" 2>&1 &
tries=0
until [ -S /mnt/socket ] || [ "$tries" -ge 200 ]; do sleep 0.05; tries=$((tries + 1)); done
slurmctld -D </dev/null >"$D/log/ctld.out" 2>&1 &
for node in n1 n2 n3; do
  unshare --mount --uts sh -ec '
    hostname "$1"
    for spool in "$D"/spool.*; do [ "$spool" = "$D/spool.$1" ] || mount -t tmpfs none "$spool"; done
    exec slurmd -D -N "$1"' sh "$node" </dev/null >"$D/log/$node.out" 2>&1 &
done
echo up
cat >/dev/null
"""


def missing() -> str:
    """Return why no cluster can stand here; "" where one can."""
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    if absent:
        return f"no {', '.join(absent)} (apt-get install --no-install-recommends slurm-wlm munge)"
    return ""


class Cluster:
    """A cluster that stands."""

    def __init__(self, place: Path, init: int) -> None:
        self.place, self._init = place, init

    def run(
        self,
        *arguments: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        text: str | None = None,
    ) -> str:
        """Run a command as a user of the cluster would; return its stdout, fail with its words."""
        done = self.try_to(*arguments, cwd=cwd, env=env, text=text)
        assert not done.returncode, (arguments, done.stdout, done.stderr)
        return done.stdout

    def try_to(
        self,
        *arguments: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        text: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command and say how it went."""
        inside = ["nsenter", "-t", str(self._init), "--pid", "--mount", "--net", "--uts"]
        place = cwd or self.place
        return subprocess.run(
            [*inside, "env", "-C", str(place), *arguments],
            env={**os.environ, **(env or {}), "SLURM_CONF": str(self.place / "slurm.conf")},
            capture_output=True,
            text=True,
            input=text if text is not None else "",
            timeout=300,
            check=False,
        )


@contextlib.contextmanager
def standing(place: Path) -> Iterator[Cluster]:
    """Stand a cluster up in a fresh directory, wait until its nodes are idle, end it all."""
    _furnish(place)
    arguments = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--net"]
    arguments += ["--uts", "sh", "-c", INIT]
    env = {**os.environ, "D": str(place), "SLURM_CONF": str(place / "slurm.conf")}
    outer = subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True
    )
    try:
        assert outer.stdout.readline() == b"up\n", _logs(place)
        cluster = Cluster(place, _child(outer.pid))
        _wait_until_idle(cluster)
        yield cluster
    finally:
        outer.kill()
        outer.wait()
        for pipe in (outer.stdin, outer.stdout):
            if pipe:
                pipe.close()


def _furnish(place: Path) -> None:
    for name in ("state", "log", "dev", *(f"spool.{node}" for node in NODES)):
        (place / name).mkdir(parents=True)
    write(place / "slurm.conf", CONF.format(place=place))
    write(place / "gres.conf", GRES.format(place=place))
    write(place / "hosts", f"127.0.0.1 localhost\n10.77.0.1 ctl {' '.join(NODES)}\n")
    for number in range(GPUS):
        os.mknod(place / f"dev/nvidia{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))


def _child(pid: int) -> int:
    """Return unshare's child, the first process of the namespace."""
    return int(text_of(Path(f"/proc/{pid}/task/{pid}/children")).split()[0])


def _wait_until_idle(cluster: Cluster) -> None:
    asked = ("sinfo", "--noheader", "-p", "p", "--format=%D %t")
    idle = f"{len(NODES)} idle"
    until(lambda: cluster.try_to(*asked).stdout.strip() == idle, lambda: _logs(cluster.place), UP_S)


def _logs(place: Path) -> str:
    return "\n".join(f"{p.name}:\n{text_of(p)[-2000:]}" for p in sorted(place.glob("log/*")))
