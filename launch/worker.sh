#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What happens on one worker, in ~/tba_jax-NAME: copied there by `setup` and called over ssh.
#
#   code/ env/        the working tree and its Python environment
#   files             what setup unpacked, so that the next setup can remove it
#   job.log           output of the job, appended to
#   pid exit          of the job; `stopping` marks that its end was asked for
#
# It knows of no other worker and of no cloud. Invariant: at most one job runs here.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
name=$(hostname)
# Workers of a TPU are called t1v-n-0123abcd-w-3.
case $name in *-w-[0-9]*) name=w-${name##*-w-} ;; esac

say() { printf '[%s] %s\n' "$name" "$*"; }

die() {
  printf '[%s] error: %s\n' "$name" "$*" >&2
  exit 1
}

is_running() {
  local pid
  pid=$(cat "$root/pid" 2>/dev/null) || return 1
  # After a reboot the number may be another program's.
  case $(ps -o args= -p "$pid" 2>/dev/null) in *worker.sh\ job*) return 0 ;; *) return 1 ;; esac
}

# Whether the job ended before its last step because a signal told it to. A pod ends with 0 then, so
# its words are asked; only process 0 says them.
has_saved() { tail -n 3 "$root/job.log" | grep -q '^Stopped by .*Run the same command again'; }

state() {
  if is_running; then
    echo running
  elif [ -f "$root/stopping" ]; then
    echo stopped
  elif [ -f "$root/exit" ] && has_saved; then
    echo saved
  elif [ -f "$root/exit" ]; then
    echo "exited-$(cat "$root/exit")"
  elif [ -f "$root/pid" ]; then
    echo died
  elif [ -f "$root/ready" ]; then
    echo ready
  else
    echo not-set-up
  fi
}

# NAME STATE, and the last line that the job itself has printed.
status() {
  printf '%s %s %s\n' "$name" "$(state)" \
    "$(tail -n 50 "$root/job.log" 2>/dev/null | grep -v '^=== ' | tail -n 1)"
}

# An environment with Python 3.11 or later; TPU VMs come with 3.10, so uv may have to bring one.
make_environment() {
  local python uv
  if "$root/env/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
    && "$root/env/bin/python" -m pip --version >/dev/null 2>&1; then
    return
  fi
  rm -rf "$root/env"
  for python in python3.12 python3.13 python3.11 python3; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
      && "$python" -m venv "$root/env" >/dev/null 2>&1; then
      return
    fi
    rm -rf "$root/env"
  done
  say "no Python 3.11 or later with venv here; uv brings one"
  uv=$(command -v uv || echo "$HOME/.local/bin/uv")
  if [ ! -x "$uv" ]; then
    curl -LsSf https://astral.sh/uv/install.sh | sh >/dev/null 2>&1 || true
  fi
  "$uv" venv --quiet --seed --python 3.12 "$root/env" \
    || die "no Python 3.11 or later, and uv could not bring one; install python3.12 and \
python3.12-venv, and run setup again"
}

# setup EXTRAS COMMAND
setup() {
  local file
  ! is_running || die "a job is running; stop it before setup replaces its code"
  rm -f "$root/ready" "$root/pid" "$root/exit" "$root/stopping"
  if [ -f "$root/job.env" ]; then chmod 600 "$root/job.env"; fi
  mkdir -p "$root/code"
  cd "$root/code"
  # Files that are gone from the working tree must go here too; what runs left behind stays.
  if [ -f "$root/files" ]; then
    while IFS= read -r file; do rm -f -- "$file"; done <"$root/files"
  fi
  tar -xzf "$root/code.tar.gz"
  tar -tzf "$root/code.tar.gz" >"$root/files"
  make_environment
  "$root/env/bin/python" -m pip install --quiet -e ".[$1]" \
    || die "pip could not install the package; the lines above say why"
  if [ -n "$2" ]; then
    bash -c "$2" || die "SETUP_COMMAND failed: $2"
  fi
  "$root/env/bin/python" -c 'import jax, sys, tba_jax
print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, tba_jax {tba_jax.__version__}")' \
    | while IFS= read -r file; do say "$file"; done
  touch "$root/ready"
}

# start JOB
start() {
  if is_running; then
    say "running already"
    return
  fi
  [ -f "$root/ready" ] || die "not set up; run setup first"
  rm -f "$root/pid" "$root/exit" "$root/stopping"
  # A session of its own: the job outlives the connection that starts it.
  setsid bash "$root/worker.sh" job "$1" >>"$root/job.log" 2>&1 </dev/null 3>&- &
  SECONDS=0
  while [ ! -f "$root/pid" ]; do
    [ "$SECONDS" -lt 10 ] || die "the job did not start; $root/job.log"
    sleep 0.1
  done
  say started
}

# job JOB: run it, pass SIGTERM on to it, and note how it ended.
job() {
  local child code=0
  echo $$ >"$root/pid.new"
  printf '=== %s: %s\n' "$(date)" "$1"
  cd "$root/code"
  PATH=$root/env/bin:$PATH
  export PATH VIRTUAL_ENV=$root/env
  if [ -f "$root/job.env" ]; then
    set -a
    # shellcheck source=/dev/null
    . "$root/job.env"
    set +a
  fi
  bash -c "$1" &
  child=$!
  # The command alone: main saves on SIGTERM, and its reward processes have to live until then.
  trap 'kill -TERM "$child" 2>/dev/null || true' TERM
  mv "$root/pid.new" "$root/pid"
  while true; do
    code=0
    wait "$child" || code=$?
    # A signal ends `wait`, not the child.
    kill -0 "$child" 2>/dev/null || break
  done
  printf '=== %s: exit %s\n' "$(date)" "$code"
  echo "$code" >"$root/exit.new"
  mv "$root/exit.new" "$root/exit"
}

# stop SECONDS
stop() {
  local pid
  if ! is_running; then
    say "nothing is running"
    return
  fi
  pid=$(cat "$root/pid")
  touch "$root/stopping"
  kill -TERM "$pid"
  SECONDS=0
  while is_running && [ "$SECONDS" -lt "$1" ]; do sleep 0.1; done
  if is_running; then
    say "did not end in $1 s; killing it"
  fi
  # Whatever the job has left behind in its session.
  kill -KILL -- "-$pid" 2>/dev/null || true
  say stopped
}

# logs LINES [follow]
logs() {
  [ -f "$root/job.log" ] || die "no job has run here yet"
  if [ "${2:-}" = follow ] && is_running; then
    tail -n "$1" -F --pid="$(cat "$root/pid")" "$root/job.log" 2>/dev/null
  else
    tail -n "$1" "$root/job.log"
  fi | sed -u "s/^/[$name] /"
}

# remove: everything that setup made; what runs have written stays.
remove() {
  local file
  stop 60
  cd "$root"
  if [ -f files ]; then
    while IFS= read -r file; do rm -f -- "code/$file"; done <files
  fi
  rm -rf env files code.tar.gz job.env job.log pid exit stopping ready worker.sh
  find code -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
  rm -rf code/*.egg-info
  find . -depth -type d -empty -delete
  if [ -d "$root" ]; then say "kept what runs have written: $root/code"; fi
  say removed
}

"$@"
