#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A GPU box: any Linux machine with an NVIDIA driver that ssh reaches, or this one. It is yours
# already, so `create` only looks at it and `delete` removes what `setup` put there.
#
#   launch/gpu.sh create|setup|run|status|logs|stop|delete [--dry-run]
set -euo pipefail

# shellcheck disable=SC2034  # for lib.sh
target=gpu
target_extra=cuda
create_help='look whether the machine answers and has a GPU'
delete_help='remove what setup put there; what runs have written stays'
may_be_taken_away=false

# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

check_settings() { need HOST "USER@HOST as ssh takes it, or local"; }

# A box that does not answer may be rebooting; it is not lost.
slice_state() { echo READY; }

create_slice() {
  on_workers 'nvidia-smi --query-gpu=name,memory.total --format=csv,noheader' \
    || die "$HOST does not answer, or has no NVIDIA driver; 'ssh $HOST nvidia-smi' has to work"
}

delete_slice() {
  on_workers "if [ -f $job_dir/worker.sh ]; then $(worker remove); else echo nothing to delete; fi"
}

on_workers() {
  if [ "$HOST" = local ]; then
    act bash -c "cd && $1"
  else
    act ssh -o ConnectTimeout=15 -o ServerAliveInterval=15 "$HOST" "$1"
  fi
}

copy_to_workers() {
  if [ "$HOST" = local ]; then
    act cp "$@" "$HOME/$job_dir/"
  else
    act scp -q "$@" "$HOST:$job_dir/"
  fi
}

main "$@"
