#!/bin/sh
# A root like a container's: pod.sh NAME ROOT SHARED WORKDIR READABLE... -- COMMAND...
# ROOT gets a file system of its own: READABLE read-only, SHARED at /shared, WORKDIR at /workspace,
# and nothing else of this machine. The command becomes process 1, as in a pod.
set -eu
name=$1 root=$2 shared=$3 work=$4
shift 4
hostname "$name"
mount -t tmpfs -o mode=755 root "$root"
while [ "$1" != -- ]; do
  if [ -L "$1" ]; then
    mkdir -p "$root$(dirname "$1")"
    ln -s "$(readlink "$1")" "$root$1"
  else
    mkdir -p "$root$1"
    mount --rbind "$1" "$root$1"
    mount -o remount,bind,ro "$root$1"
  fi
  shift
done
shift
mkdir -p "$root/shared" "$root/workspace" "$root/proc" "$root/dev" "$root/tmp" "$root/etc"
chmod 1777 "$root/tmp"
mount --bind "$shared" "$root/shared"
mount --bind "$work" "$root/workspace"
mount -t proc proc "$root/proc"
for device in null zero random urandom; do
  : >"$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
printf '127.0.0.1 localhost\n127.0.1.1 train-0\n127.0.1.2 train-1\n' >"$root/etc/hosts"
exec chroot "$root" /usr/bin/env -C /workspace "$@"
