#!/usr/bin/env bash
# cluster_up.sh FOLDER - start a private Slurm of several nodes on this machine; FOLDER holds everything of it.
# Needs root and Debian or Ubuntu: missing packages are installed. Touches nothing else but: a network bridge (mode
# netns), or marked lines in /etc/hosts (mode multi). Then `. FOLDER/env.sh`, and sbatch, squeue ... speak to it.
#   SLURM_TEST_NODES=2    nodes n1, n2 ...             SLURM_TEST_CPUS=4   CPUs that each node claims to have
#   SLURM_TEST_DISK=0      1: FOLDER/disk is a file system of its own, which `cluster_node.sh FOLDER freeze disk` stops
#   SLURM_TEST_MODE=auto  netns: each node has its own network, processes and host name, and can be cut off
#                         multi: several slurmd on one host, where namespaces are forbidden
#   SLURM_TEST_ROOT=       Slurm from there, made by newer_slurm.sh, not the one that is installed
set -euo pipefail
export LC_ALL=C DEBIAN_FRONTEND=noninteractive PATH="$PATH:/usr/sbin:/sbin"
here=$(cd "$(dirname "$0")" && pwd -P)
mkdir -p "${1:?usage: cluster_up.sh FOLDER}"
D=$(cd "$1" && pwd -P)
ROOT=${SLURM_TEST_ROOT:-}
export PATH="${ROOT:+$ROOT/bin:}$PATH"
NODES=${SLURM_TEST_NODES:-2} CPUS=${SLURM_TEST_CPUS:-4} MODE=${SLURM_TEST_MODE:-auto}
fail() { echo "cluster_up: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || fail "needs root, to start slurmd and to make network namespaces"
[ -z "$ROOT" ] || [ -x "$ROOT/bin/slurmctld" ] || fail "SLURM_TEST_ROOT=$ROOT: no Slurm there; newer_slurm.sh makes one"
[ "${#D}" -lt 60 ] || fail "the folder's path is too long for unix sockets: $D"

# ------------------------------------------------------------------------------------------------ packages
missing=()
for pair in munged:munge slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client ip:iproute2; do
  command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
install_missing() {
  command -v apt-get >/dev/null || fail "not installed: ${missing[*]}, and there is no apt-get"
  # The packages' own services must not start while they are installed.
  local policy=/usr/sbin/policy-rc.d made=0 result=0
  [ -e "$policy" ] || { printf '#!/bin/sh\nexit 101\n' > "$policy"; chmod 755 "$policy"; made=1; }
  { apt-get install -y -q --no-install-recommends "${missing[@]}" ||
    { apt-get update -q && apt-get install -y -q --no-install-recommends "${missing[@]}"; }; } \
    > "$D/apt.log" 2>&1 || result=1
  [ "$made" = 0 ] || rm -f "$policy"
  [ "$result" = 0 ] || fail "apt-get could not install ${missing[*]}: $(tail -n 3 "$D/apt.log")"
}
[ "${#missing[@]}" = 0 ] || install_missing

# ------------------------------------------------------------------------------------------------ settings
mkdir -p "$D"/{log,pid,run,spool,state,munge,nodes}
chmod 755 "$D" "$D"/{run,munge}
if [ "$MODE" = auto ]; then
  MODE=multi
  if unshare --net --uts --pid --mount --ipc --fork --mount-proc true 2>/dev/null &&
     ip link add "slt$$" type bridge 2>/dev/null; then
    ip link del "slt$$"; MODE=netns
  fi
fi
hash=$(printf %s "$D" | cksum | cut -d ' ' -f 1)
for ((; ; hash++)); do # until no other cluster has these names
  NET=10.$((200 + hash % 40)).$((hash / 64 % 256)) TAG=$(printf 's%04x' $((hash % 65536)))
  [ -n "$(ip -o address | grep -e " $TAG-" -e " $NET\.")" ] || break
done
PORT=$((20000 + hash % 8000))
in_use() { ss -Hltn | awk -v b="$PORT" '{n=split($4,a,":"); if (a[n]>=b && a[n]<=b+40) f=1} END{exit !f}'; }
while in_use; do PORT=$((PORT + 50)); done
printf '%s=%s\n' D "$D" MODE "$MODE" NODES "$NODES" NET "$NET" TAG "$TAG" PORT "$PORT" ROOT "$ROOT" > "$D/settings"
printf 'export SLURM_CONF=%s/slurm.conf PATH="%s$PATH:/usr/sbin:/sbin"\n' "$D" "${ROOT:+$ROOT/bin:}" > "$D/env.sh"
export SLURM_CONF="$D/slurm.conf"
. "$here/cluster_processes.sh"

# ------------------------------------------------------------------------------------------------ addresses
host=$(hostname -s)
if [ "$MODE" = netns ]; then
  controller=$NET.1
  ip link add "$TAG-br" type bridge
  ip addr add "$NET.1/24" dev "$TAG-br"
  ip link set "$TAG-br" up
else
  controller=127.0.0.1
fi
address() { if [ "$MODE" = netns ]; then echo "$NET.$((10 + $1))"; else echo "127.0.0.$((10 + $1))"; fi; }
{ echo "127.0.0.1 localhost"; echo "$controller $host"
  for i in $(seq "$NODES"); do echo "$(address "$i") n$i"; done; } > "$D/hosts"
# In the namespaces names come from the file alone: there is no route to a name server, and asking takes 10 s.
printf 'passwd: files\ngroup: files\nhosts: files\n' > "$D/nsswitch.conf"
if [ "$MODE" = multi ]; then
  for i in $(seq "$NODES"); do echo "$(address "$i") n$i # $D"; done >> /etc/hosts
fi

# ------------------------------------------------------------------------------------------------ a disk
# Mounted before the nodes start: each has its own view of the mounts from then on.
mkdir -p "$D/disk"
if [ "${SLURM_TEST_DISK:-0}" = 1 ]; then
  truncate -s 1G "$D/disk.image"
  mkfs.ext4 -q "$D/disk.image" && mount -o loop "$D/disk.image" "$D/disk" || fail "no loop device for $D/disk"
fi

# ------------------------------------------------------------------------------------------------ configuration
sed -e "s|@D@|$D|g" -e "s|@PORT@|$PORT|g" -e "s|@CONTROLLER@|$host($controller)|g" "$here/slurm.conf.in" > "$D/slurm.conf"
[ -z "$ROOT" ] || echo "PluginDir=$ROOT/plugins" >> "$D/slurm.conf"
for i in $(seq "$NODES"); do
  if [ "$MODE" = netns ]; then real=n$i; else real=$host; fi
  echo "NodeName=n$i NodeHostname=$real NodeAddr=$(address "$i") Port=$((PORT + i)) CPUs=$CPUS RealMemory=8000"
done >> "$D/slurm.conf"
echo "PartitionName=main Nodes=n[1-$NODES] Default=YES MaxTime=INFINITE DefaultTime=60 PriorityTier=10 PreemptMode=OFF" >> "$D/slurm.conf"
echo "PartitionName=scavenge Nodes=n[1-$NODES] MaxTime=INFINITE DefaultTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=20" >> "$D/slurm.conf"
# On a quiet cluster slurmctld 24.11.5 misses one request in fifty until its own MessageTimeout: the others wait longer.
cp "$D/slurm.conf" "$D/slurmctld.conf"
[ -z "$ROOT" ] || sed -i 's/^MessageTimeout=.*/MessageTimeout=15/' "$D/slurm.conf"
# slurmd loads a cgroup plugin even where nothing uses it, and automatic detection dies where cgroups are not mounted.
case $(slurmd -V | awk '{print $NF}') in
  1?.*|2[0-3].*|24.0[0-4].*) echo "CgroupPlugin=cgroup/v1" ;;
  *) echo "CgroupPlugin=disabled" ;;
esac > "$D/cgroup.conf"

# ------------------------------------------------------------------------------------------------ daemons
(umask 077; head -c 1024 /dev/urandom > "$D/munge/key")
start_daemon munged munged -F -f --key-file="$D/munge/key" --socket="$D/run/munge.sock" \
  --pid-file="$D/run/munged.pid" --log-file="$D/log/munged.log" --seed-file="$D/munge/seed"
wait_for 60 munge -n --socket="$D/run/munge.sock" || fail "munged does not answer: $D/log/munged.log"
"$here/cluster_node.sh" "$D" start controller
controller_is_up() { scontrol ping | grep -q ' UP'; }
wait_for 120 controller_is_up || fail "slurmctld does not answer: $(tail -n 3 "$D/log/slurmctld.log")"
for i in $(seq "$NODES"); do "$here/cluster_node.sh" "$D" start "n$i"; done
nodes_are_idle() { [ "$(sinfo -h -N -p main -o '%T' | grep -c '^idle$')" = "$NODES" ]; }
wait_for 180 nodes_are_idle || fail "the nodes did not come up: $(tail -n 3 "$D"/log/node-*.out)"
echo "cluster_up: Slurm with $NODES nodes, mode $MODE. Now: . $D/env.sh"
