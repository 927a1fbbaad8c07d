# Sourced by the other scripts. A process is remembered as "<pid> <start time>", so that a pid that was given to
# another process is never signalled; a zombie counts as ended. Expects D, the cluster's folder.

started_at() { # PID -> its start time; fails when it has ended
  local stat
  stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
  stat=${stat##*) }
  set -- $stat
  [ "$1" != Z ] && [ "$1" != X ] || return 1
  echo "${20}"
}

is_alive() { # FILE written by `remember`
  local pid start
  [ -s "$1" ] && read -r pid start < "$1" && [ "$(started_at "$pid" || true)" = "$start" ]
}

remember() { # PID FILE
  local start
  start=$(started_at "$1") || return 1
  echo "$1 $start" > "$2"
}

wait_for() { # SECONDS COMMAND...
  local end=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$end" ] || return 1
    sleep 0.05
  done
}

start_daemon() { # NAME COMMAND... in a session of its own, without a terminal
  local name=$1
  shift
  setsid "$@" </dev/null >> "$D/log/$name.out" 2>&1 &
  remember $! "$D/pid/$name" || { tail -n 5 "$D/log/$name.out" >&2; return 1; }
}

has_ended() { ! is_alive "$1"; }

stop_process() { # FILE SECONDS: TERM, then KILL
  local pid start
  if is_alive "$1"; then
    read -r pid start < "$1"
    kill -TERM "$pid"
    wait_for "$2" has_ended "$1" || kill -KILL "$pid"
  fi
  rm -f "$1"
}
