#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One worker, in ~/tba_jax-NAME: setup copies this file there, and it is called over ssh. A file job.env
# there (NAME=VALUE lines) sets the environment of the job. The job that runs holds the file `lock`.
#   worker.sh pack FILE | setup EXTRAS COMMAND | start JOB | status | stop SECONDS | logs LINES
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
name=$(hostname) && name=${name/#*-w-/w-} # workers of a TPU: t1v-n-0123abcd-w-3
say() { echo "[$name] $*"; }
die() { say "error: $*" >&2 && exit 1; }
is_running() { ! flock -sn lock true; }
pack() { # archive the files of the working tree that git does not ignore
  cd .. && git ls-files -z --cached --others --exclude-standard \
    | while IFS= read -r -d '' file; do [ ! -f "$file" ] || printf '%s\0' "$file"; done \
    | COPYFILE_DISABLE=1 tar --null -czf "$1" -T -
}
setup() {
  ! is_running || die "a job is running; stop it before setup replaces its code"
  rm -rf ready pid exit stopping code/tba_jax # what runs wrote stays
  mkdir -p code && tar -xzf code.tar.gz -C code
  uv=~/.local/bin/uv && cd code
  [ -x $uv ] || curl -LsSf https://astral.sh/uv/install.sh | sh
  $uv venv --quiet --allow-existing --python 3.12 ../env || die "uv could not install Python 3.12"
  $uv pip install --quiet --python ../env -e ".[$1]" || die "uv could not install the package"
  [ -z "$2" ] || bash -c "$2" || die "SETUP_COMMAND failed: $2"
  version=$(../env/bin/python -c 'import jax, tba_jax; print("jax", jax.__version__)')
  say "$(../env/bin/python -V), $version" && touch ../ready
}
start() {
  [ -f ready ] || die "not set up; run setup first"
  exec 9>lock
  if ! flock -w 1 9; then say "running already" && return; fi
  rm -f exit stopping child
  setsid bash worker.sh job "$1" >>job.log 2>&1 </dev/null & # it outlives the connection
  echo $! >pid && say started
}
job() { # run a command, and note its exit status: 0 also of a pod that a signal ended
  echo "=== $(date): $1"
  # shellcheck source=/dev/null
  if [ -f job.env ]; then set -a && . ./job.env && set +a; fi
  (cd code && PATH=$PWD/../env/bin:$PATH exec bash -c "$1") 9>&- &
  echo $! >child
  code=0 && wait $! || code=$?
  echo "=== $(date): exit $code" && echo "$code" >"exit"
}
stop() { # SIGTERM to the command alone, which saves; then end whatever is left of its session
  if ! is_running; then say "nothing is running" && return; fi
  touch stopping && kill -TERM "$(cat child)" && flock -s -w "$1" lock true || true
  kill -KILL -- "-$(cat pid)" 2>/dev/null || true
  say stopped
}
status() {
  ran=$(! is_running || echo running) # asked first: a job that ends now has noted its exit
  state=not-set-up; for mark in ready pid exit stopping; do [ ! -f $mark ] || state=$mark; done
  case $state in pid) state=died ;; exit) state=exited-$(cat exit) ;; stopping) state=stopped ;; esac
  [ "$state" != exited-0 ] || ! tail -n 3 job.log | grep -q '^Stopped by .* same command' || state=saved
  echo "$name ${ran:-$state} $(tail -n 50 job.log 2>/dev/null | grep -v '^=== ' | tail -n 1)"
}
logs() { tail -n "$1" job.log | sed "s/^/[$name] /"; }
"$@"
