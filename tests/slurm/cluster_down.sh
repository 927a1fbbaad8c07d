#!/usr/bin/env bash
# cluster_down.sh FOLDER - stop the cluster that cluster_up.sh started there, and only its processes; remove FOLDER.
set -uo pipefail
export PATH="$PATH:/usr/sbin:/sbin"
here=$(cd "$(dirname "$0")" && pwd -P)
D=$(cd "${1:?usage: cluster_down.sh FOLDER}" 2>/dev/null && pwd -P) || exit 0
[ -s "$D/settings" ] || { echo "cluster_down: no cluster in $D" >&2; exit 1; }
. "$D/settings"
. "$here/cluster_processes.sh"
for node in $(seq "$NODES"); do "$here/cluster_node.sh" "$D" kill "n$node"; done
stop_process "$D/pid/slurmctld" 10
stop_process "$D/pid/munged" 5
[ "$MODE" != netns ] || ip link del "$TAG-br" 2>/dev/null
if grep -q "# $D\$" /etc/hosts; then
  # Written in place: /etc/hosts may be a bind mount.
  kept=$(grep -v "# $D\$" /etc/hosts)
  printf '%s\n' "$kept" > /etc/hosts
fi
if mountpoint -q "$D/disk"; then
  fsfreeze --unfreeze "$D/disk" 2>/dev/null || :
  umount "$D/disk" || umount --lazy "$D/disk"
fi
rm -rf "$D"
