#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Train on a GPU box that ssh reaches: any Linux machine with an NVIDIA driver.
#
#   launch/gpu.sh HOST setup [EXTRAS]      copy the working tree to ~/tba_jax-job and install it
#   launch/gpu.sh HOST start 'COMMAND'     in code/, with the environment active; resumes a run
#   launch/gpu.sh HOST status | logs [LINES] | stop
#   DRY_RUN=1 launch/gpu.sh ...            print the commands
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -ge 2 ] || { sed -n '3,/^set/ { /^#/ s/^# \{0,1\}//p; }' "$0" && exit 2; }
host=$1 verb=$2 argument=${3:-} folder=${FOLDER:-tba_jax-job}
act() { if [ -n "${DRY_RUN:-}" ]; then printf '+%s\n' "$(printf ' %q' "$@")"; else "$@"; fi; }
worker() { act ssh -o ConnectTimeout=15 "$host" "bash $folder/worker.sh$(printf ' %q' "$@")"; }

case $verb in
  setup)
    scratch=$(mktemp -d)
    trap 'rm -rf -- "$scratch"' EXIT
    act "$here/worker.sh" pack "$scratch/code.tar.gz"
    act ssh -o ConnectTimeout=15 "$host" "nvidia-smi -L && mkdir -p $folder"
    act scp -q "$here/worker.sh" "$scratch/code.tar.gz" "$host:$folder/"
    worker setup "cuda${argument:+,$argument}" ''
    ;;
  start) worker start "$argument" ;;
  status) worker status ;;
  logs) worker logs "${argument:-50}" ;;
  stop) worker stop 120 ;;
  *) echo "error: no verb '$verb'; wanted setup, start, status, logs or stop" >&2 && exit 2 ;;
esac
