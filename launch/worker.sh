#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# One worker, in ~/tba_jax-NAME: setup copies this file there, and it is called over ssh. A file
# job.env there (NAME=VALUE lines) sets the environment of the job. At most one job runs here.
#
#   worker.sh pack FILE | setup EXTRAS COMMAND | start JOB | status | stop SECONDS | logs LINES
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
name=$(hostname)
case $name in *-w-[0-9]*) name=w-${name##*-w-} ;; esac # workers of a TPU: t1v-n-0123abcd-w-3

say() { echo "[$name] $*"; }
die() { say "error: $*" >&2 && exit 1; }

is_running() { # after a reboot the number may be that of another program
  case $(ps -o args= -p "$(cat pid 2>/dev/null || echo 0)" 2>/dev/null) in *worker.sh\ job*) ;; *) false ;; esac
}

status() {
  local state=not-set-up
  if is_running; then
    state=running
  elif [ -f stopping ]; then
    state=stopped
  elif [ -f exit ]; then
    state=exited-$(cat exit)
    # A pod that a signal ends exits with 0.
    if tail -n 3 job.log | grep -q '^Stopped by .*Run the same command again'; then state=saved; fi
  elif [ -f pid ]; then
    state=died
  elif [ -f ready ]; then
    state=ready
  fi
  echo "$name $state $(tail -n 50 job.log 2>/dev/null | grep -v '^=== ' | tail -n 1)"
}

pack() { # archive the files of the working tree that git does not ignore
  cd ..
  git ls-files -z --cached --others --exclude-standard \
    | while IFS= read -r -d '' file; do [ ! -f "$file" ] || printf '%s\0' "$file"; done \
    | COPYFILE_DISABLE=1 tar --null -czf "$1" -T -
}

setup() {
  ! is_running || die "a job is running; stop it before setup replaces its code"
  rm -f ready pid exit stopping
  mkdir -p code
  [ ! -f files ] || (cd code && tr '\n' '\0' <../files | xargs -0 rm -f --) # what runs wrote stays
  tar -xzf code.tar.gz -C code
  tar -tzf code.tar.gz >files
  cd code
  if ! ../env/bin/python -m pip --version >/dev/null 2>&1 \
    && ! python3.12 -m venv ../env >/dev/null 2>&1; then # TPU VMs come with Python 3.10
    [ -x ~/.local/bin/uv ] || curl -LsSf https://astral.sh/uv/install.sh | sh >/dev/null 2>&1
    ~/.local/bin/uv venv --quiet --clear --seed --python 3.12 ../env || die "uv could not install \
Python 3.12; install python3.12 and python3.12-venv, and run setup again"
  fi
  ../env/bin/python -m pip install --quiet -e ".[$1]" || die "pip could not install the package"
  [ -z "$2" ] || bash -c "$2" || die "SETUP_COMMAND failed: $2"
  say "$(../env/bin/python -c 'import jax, sys, tba_jax
print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, tba_jax {tba_jax.__version__}")')"
  touch ../ready
}

start() {
  if is_running; then say "running already" && return; fi
  [ -f ready ] || die "not set up; run setup first"
  rm -f pid exit stopping
  # A session of its own: the job outlives the connection that starts it.
  setsid bash "$PWD/worker.sh" job "$1" >>job.log 2>&1 </dev/null &
  for _ in $(seq 100); do [ -f pid ] || sleep 0.1; done
  [ -f pid ] || die "the job did not start; see $PWD/job.log"
  say started
}

job() { # run a command, pass SIGTERM on to it alone (it saves), and note its exit status
  local code=0 child
  echo "=== $(date): $1"
  export PATH=$PWD/env/bin:$PATH VIRTUAL_ENV=$PWD/env
  set -a
  # shellcheck source=/dev/null
  [ ! -f job.env ] || . ./job.env
  set +a
  (cd code && exec bash -c "$1") &
  child=$!
  trap 'kill -TERM "$child" 2>/dev/null || true' TERM
  echo $$ >pid.new && mv pid.new pid
  while true; do # a signal ends `wait`, not the child
    code=0 && wait "$child" || code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  echo "=== $(date): exit $code"
  echo "$code" >exit.new && mv exit.new exit
}

stop() {
  if ! is_running; then say "nothing is running" && return; fi
  touch stopping
  kill -TERM "$(cat pid)"
  SECONDS=0
  while is_running && [ "$SECONDS" -lt "$1" ]; do sleep 0.1; done
  kill -KILL -- "-$(cat pid)" 2>/dev/null || true # whatever is left of the session
  say stopped
}

logs() { tail -n "$1" job.log | sed "s/^/[$name] /"; }

"$@"
