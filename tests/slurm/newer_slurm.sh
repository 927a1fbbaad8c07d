#!/usr/bin/env bash
# newer_slurm.sh [SUITE] - Slurm of another Debian (default: trixie, with 24.11) beside this machine's own. Prints its
# folder: `SLURM_TEST_ROOT=FOLDER cluster_up.sh ...` takes daemons and commands from there, and jobs run this machine's
# Python as ever. The packages are unpacked, not installed, and their programs bound to their own C library.
# Made once, in the user's cache folder, from this machine's Debian mirror; root is needed where patchelf is missing.
set -euo pipefail
export LC_ALL=C DEBIAN_FRONTEND=noninteractive
suite=${1:-trixie}
root=${XDG_CACHE_HOME:-$HOME/.cache}/dist-transformer/slurm-of-$suite
mkdir -p "$root"
exec 9> "$root/lock"
flock 9 # another process may be making it
if [ -e "$root/complete" ]; then echo "$root"; exit; fi
exec 3>&1 4>&2 > "$root/log" 2>&1
trap '[ $? = 0 ] || echo "newer_slurm: no Slurm of $suite: $(tail -n 3 "$root/log")" >&4' EXIT

install_patchelf() { apt-get install --yes --quiet patchelf; }
command -v patchelf || install_patchelf || { apt-get update --quiet && install_patchelf; }

# ------------------------------------------------------------------------------------------------ packages
# apt with a state of its own, in which nothing is installed: it takes every library along, the C library too.
rm -rf "$root"/{apt,bin,etc,plugins,usr,var}
mkdir -p "$root"/apt/{lists,cache}/partial "$root/bin"
mirror=$(apt-get indextargets --format '$(LABEL) $(REPO_URI)' | awk '$1 == "Debian" {found = $2} END {print found}')
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror:-http://deb.debian.org/debian} $suite main" \
  > "$root/apt/sources.list"
options=(--quiet --yes --no-install-recommends -o Dir::Etc::SourceList="$root/apt/sources.list" -o Dir::Etc::SourceParts=-
  -o Dir::Etc::Preferences=- -o Dir::Etc::PreferencesParts=- -o Dir::State::Lists="$root/apt/lists"
  -o Dir::State::Status=/dev/null -o Dir::Cache="$root/apt/cache" -o Dir::Cache::Archives="$root/apt/cache"
  -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" --download-only install munge slurmctld slurmd slurm-client
for package in "$root"/apt/cache/*.deb; do dpkg-deb --extract "$package" "$root"; done

# ------------------------------------------------------------------------------------------------ programs
libraries=$(dirname "$(find "$root/usr/lib" -name libc.so.6)")
for program in munge munged sacct salloc sbatch scancel scontrol sinfo slurmctld slurmd slurmstepd squeue srun; do
  file=$(find "$root"/usr/{bin,sbin} -name "$program" -o -name "$program-wlm")
  patchelf --set-interpreter "$root/usr$(patchelf --print-interpreter "$file")" \
    --force-rpath --set-rpath "$libraries:$libraries/slurm-wlm" --output "$root/bin/$program" "$file"
done
ln -s "$libraries/slurm-wlm" "$root/plugins"
"$root/bin/slurmd" -V
rm -rf "$root/apt"
touch "$root/complete"
echo "$root" >&3
