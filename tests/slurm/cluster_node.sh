#!/usr/bin/env bash
# cluster_node.sh FOLDER start|kill|cut|heal|slow NODE - one node of the cluster that cluster_up.sh started in FOLDER.
# kill: as if the power went. cut, slow and heal: its network (mode netns only).
# start|kill controller: slurmctld. freeze|thaw disk: whoever writes there, or opens a file to write, waits.
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin"
here=$(cd "$(dirname "$0")" && pwd -P)
D=$(cd "$1" && pwd -P)
action=$2 node=$3
. "$D/settings"
. "$here/cluster_processes.sh"
export SLURM_CONF="$D/slurm.conf" PATH="${ROOT:+$ROOT/bin:}$PATH"
file=$D/nodes/$node
cd "$D" # where a daemon that crashes leaves its memory

run_node() { # the first process of the node; in netns mode its death ends every process of the node
  if [ "$MODE" = netns ]; then
    mount --make-rprivate /
    hostname "$node"
    ip link set lo up
    mount --bind "$D/hosts" /etc/hosts
    mount --bind "$D/nsswitch.conf" /etc/nsswitch.conf
    wait_for 120 ip link show eth0
    ip addr add "$NET.$((10 + ${node#n}))/24" dev eth0
    ip link set eth0 up
  fi
  slurmd -N "$node" ${ROOT:+-d "$ROOT/bin/slurmstepd"} -D &
  # It stays when slurmd dies, as its job steps would; bash reaps the orphans.
  trap : TERM HUP INT
  [ -p "$D/run/$node.fifo" ] || mkfifo "$D/run/$node.fifo"
  exec 9<> "$D/run/$node.fifo"
  while :; do read -r -t 86400 <&9 || :; done
}

own_network() { [ "$(readlink "/proc/$1/ns/net")" != "$(readlink /proc/self/ns/net)" ]; }

start_in_namespaces() {
  ip link del "$TAG-$node" 2>/dev/null || :
  setsid unshare --net --uts --pid --mount --ipc --fork --kill-child --mount-proc \
    "$here/cluster_node.sh" "$D" run "$node" </dev/null >> "$D/log/node-$node.out" 2>&1 &
  local pid=$!
  wait_for 120 own_network "$pid"
  remember "$pid" "$file"
  ip link add "$TAG-$node" type veth peer name eth0 netns "$pid"
  ip link set "$TAG-$node" master "$TAG-br"
  ip link set "$TAG-$node" up
}

descendants() { # PID -> all processes below it
  local child
  for child in $(cat "/proc/$1"/task/*/children 2>/dev/null); do echo "$child"; descendants "$child"; done
}

kill_node() {
  local pid start i
  is_alive "$file" || return 0
  read -r pid start < "$file"
  # All stop before the first one ends, which another could notice and record; a few times: job steps detach themselves.
  # Children end first: an srun that is stopped when its parent ends is continued by Linux, and would end its step.
  for i in 1 2 3; do kill -STOP $(descendants "$pid") 2>/dev/null || :; done
  for i in 1 2 3; do kill -KILL $(descendants "$pid" | tac) 2>/dev/null || :; done
  kill -KILL "$pid" 2>/dev/null || :
  wait_for 120 has_ended "$file"
  [ "$MODE" != netns ] || ip link del "$TAG-$node" 2>/dev/null || :
  rm -f "$D/spool/$node/${node}_"[0-9]*
}

case $action-$node in
  start-controller) start_daemon slurmctld slurmctld -D -i -f "$D/slurmctld.conf"; exit ;;
  kill-controller) stop_process "$D/pid/slurmctld" 10; exit ;;
  freeze-disk) fsfreeze --freeze "$D/disk"; exit ;;
  thaw-disk) fsfreeze --unfreeze "$D/disk"; exit ;;
esac
case $action in
  run) run_node ;;
  start) if is_alive "$file"; then :; elif [ "$MODE" = netns ]; then start_in_namespaces
         else start_daemon "node-$node" perl "$here/subreaper.pl" "$here/cluster_node.sh" "$D" run "$node"; mv "$D/pid/node-$node" "$file"; fi ;;
  kill) kill_node ;;
  cut) ip link set "$TAG-$node" down ;;
  heal) ip link set "$TAG-$node" up; tc qdisc del dev "$TAG-$node" root 2>/dev/null || : ;;
  slow) tc qdisc replace dev "$TAG-$node" root tbf rate 200mbit burst 64kb latency 400ms ;;
  *) sed -n 2,5p "$here/cluster_node.sh"; exit 2 ;;
esac
