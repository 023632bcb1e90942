#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A TPU VM or a TPU pod: a queued resource with one TPU VM of the same name. The accelerator type
# decides how many workers there are; every command addresses all of them.
#
#   launch/tpu.sh create|setup|run|status|logs|stop|delete [--dry-run]
set -euo pipefail

# shellcheck disable=SC2034  # for lib.sh
target=tpu
target_extra=tpu
create_help='ask for the TPU and wait until it is there; again: wait on, or replace a preempted one'
delete_help='give the TPU back: what is on its disks is lost, and it costs nothing any more'

# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

check_settings() {
  need PROJECT "the Google Cloud project that pays"
  need ZONE "a zone that has such TPUs, like us-west4-a"
  need ACCELERATOR "the type and size of the slice, like v5litepod-8"
  RUNTIME=${RUNTIME:-$(default_runtime)} || exit
  may_be_taken_away=false
  case ${PROVISIONING:-} in
    spot)
      provisioning_flags=(--spot)
      may_be_taken_away=true
      ;;
    on-demand) provisioning_flags=() ;;
    reserved) provisioning_flags=(--reserved) ;;
    *) die "PROVISIONING=${PROVISIONING:-} is none of spot, on-demand, reserved; change it in \
$settings_file" ;;
  esac
  $dry_run || command -v gcloud >/dev/null || die "no gcloud here; install the Google Cloud CLI \
(https://cloud.google.com/sdk/docs/install) and run gcloud auth login"
  # Several words each, on purpose.
  # shellcheck disable=SC2206
  create_flags=($CREATE_FLAGS) ssh_flags=($SSH_FLAGS)
  where=(--quiet "--project=$PROJECT" "--zone=$ZONE")
}

default_runtime() {
  case $ACCELERATOR in
    v2-* | v3-* | v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) die "no runtime version known for ACCELERATOR=$ACCELERATOR; set RUNTIME in $settings_file \
('gcloud compute tpus tpu-vm versions list --zone=$ZONE' lists them; TPU7x needs GKE, see \
docs/launch/clusters.md)" ;;
  esac
}

# listed COLLECTION STATE_FIELD SUPPOSED: the state of the thing called $NAME; nothing if there is
# none. `list` says by its exit status whether the answer can be trusted, `describe` does not.
listed() {
  local rows
  rows=$(ask "$3" gcloud compute tpus "$1" list "${where[@]}" \
    "--format=value(name.basename(),$2)") || die "gcloud could not list the $1; its own words are \
above. 'gcloud auth login' and PROJECT and ZONE in $settings_file are the usual remedies"
  printf '%s\n' "$rows" | awk -v name="$NAME" '$1 == name { print $2 }'
}

slice_state() {
  local request node=''
  case $supposed in
    ABSENT) request='' ;;
    LOST) request="$NAME SUSPENDED" ;;
    *) request="$NAME ACTIVE" ;;
  esac
  request=$(listed queued-resources state.state "$request") || return
  if [ "$request" = ACTIVE ]; then
    node=$(listed tpu-vm state "$NAME READY") || return
  fi
  case $request:$node in
    :) echo ABSENT ;;
    ACTIVE:READY) echo READY ;;
    # A preempted node may be seen before the request knows.
    ACTIVE: | ACTIVE:PREEMPTED | ACTIVE:TERMINATED | ACTIVE:DELETING) echo LOST ;;
    SUSPENDING: | SUSPENDED: | FAILED: | DELETING:) echo LOST ;;
    ACTIVE:*) echo "$node" ;;
    *) echo "$request" ;;
  esac
}

create_slice() {
  local state last=''
  if $dry_run && [ "$supposed" = READY ]; then supposed=ABSENT; fi
  state=$(slice_state) || return
  SECONDS=0
  case $state in
    LOST)
      say "$NAME was taken away or failed; deleting what is left of it"
      delete_slice || return
      state=ABSENT
      ;;
    READY)
      say "$NAME is there"
      return
      ;;
  esac
  if [ "$state" = ABSENT ]; then
    act gcloud compute tpus queued-resources create "$NAME" "--node-id=$NAME" "${where[@]}" \
      "--accelerator-type=$ACCELERATOR" "--runtime-version=$RUNTIME" \
      ${provisioning_flags[@]+"${provisioning_flags[@]}"} \
      ${create_flags[@]+"${create_flags[@]}"} \
      || die "gcloud refused the request; its own words are above"
  fi
  supposed=READY
  while true; do
    state=$(slice_state) || return
    case $state in
      READY)
        say "$NAME is ready"
        return
        ;;
      LOST)
        act gcloud compute tpus queued-resources describe "$NAME" "${where[@]}"
        die "the request for $NAME failed or was taken away at once; see above. 'create' again \
asks anew"
        ;;
    esac
    [ "$state" = "$last" ] || say "waiting for $NAME: $state"
    last=$state
    [ "$SECONDS" -lt $((CREATE_TIMEOUT_MIN * 60)) ] || die "$NAME is still $state after \
$CREATE_TIMEOUT_MIN minutes. The request stays in the queue: create again to wait, or delete"
    pause
  done
}

delete_slice() {
  local request node
  request=$(listed queued-resources state.state "$NAME ACTIVE") || return
  if [ -n "$request" ]; then
    say "deleting $NAME"
    act gcloud compute tpus queued-resources delete "$NAME" "${where[@]}" --force || return
  fi
  # A node without its request still costs money.
  node=$(listed tpu-vm state '') || return
  if [ -n "$node" ]; then
    act gcloud compute tpus tpu-vm delete "$NAME" "${where[@]}" || return
  fi
  if [ -z "$request$node" ]; then
    say "nothing to delete: there is no $NAME in $ZONE"
  else
    say "$NAME is deleted"
  fi
}

on_workers() {
  act gcloud compute tpus tpu-vm ssh "$NAME" "${where[@]}" --worker=all \
    '--ssh-flag=-o ConnectTimeout=15' '--ssh-flag=-o ServerAliveInterval=15' \
    ${ssh_flags[@]+"${ssh_flags[@]}"} "--command=$1"
}

copy_to_workers() {
  act gcloud compute tpus tpu-vm scp "$@" "$NAME:$job_dir/" "${where[@]}" --worker=all \
    ${ssh_flags[@]+"${ssh_flags[@]}"}
}

main "$@"
