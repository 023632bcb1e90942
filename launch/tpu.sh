#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Train on a TPU VM or a TPU pod: a queued resource and a TPU VM of the same name.
#
#   launch/tpu.sh create|setup|run|status|logs|stop|delete [--dry-run]
#
#   create   request the slice and wait for it; replace a preempted one
#   setup    copy the working tree to every worker and install it there
#   run      start JOB on every worker and watch it; again: watch, or resume. With
#            --restart-on-preemption: create and set up what is missing, also after a preemption
#   stop     the run saves, then ends;   delete   the slice and its disks, which then cost nothing
#
# bash reads the settings from launch/settings.env, or the file named by SETTINGS:
#   NAME=tba-gsm8k PROJECT=my-project ZONE=us-west4-a ACCELERATOR=v5litepod-8
#   JOB='python -m tba_jax.main --config=configs/math.py:gsm8k --workdir=/mnt/runs/gsm8k'
#   PROVISIONING=spot (on-demand, reserved)   RUNTIME=(by ACCELERATOR)   EXTRAS=hub,wandb
#   SETUP_COMMAND=(at the end of setup, like a mount)   CREATE_FLAGS= SSH_FLAGS= (for gcloud)
# Invariant: with --dry-run nothing runs but printing. Plain bash 3.2, which macOS has.
# shellcheck disable=SC2153  # settings are assigned in the user's file
set -euo pipefail
exec 3>&1 # where --dry-run prints, also from inside $(...)

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
settings=${SETTINGS:-$here/settings.env} dry_run=false restart=false
supposed=READY # state of the slice in a dry run

say() { if $dry_run; then echo "# $*"; else echo "[$(date +%H:%M:%S)] $*"; fi; }
die() { echo "error: $*" >&2 && exit 2; }
act() { # run a command; print it instead in a dry run
  if $dry_run; then printf '+%s\n' "$(printf ' %q' "$@")" >&3; else "$@"; fi
}
pause() { $dry_run || sleep "${POLL_S:-30}"; }
need() { [ -n "${!1:-}" ] || die "$1 is not set ($2); set it in $settings"; }

read_settings() {
  [ -f "$settings" ] || die "no settings file $settings; launch/tpu.sh help shows an example"
  # shellcheck source=/dev/null
  . "$settings"
  need NAME "name of the slice"
  need PROJECT "the Google Cloud project that pays"
  need ZONE "a zone that has such TPUs, like us-west4-a"
  need ACCELERATOR "type and size of the slice, like v5litepod-8"
  case $NAME in *[!a-z0-9-]* | [!a-z]*) die "NAME=$NAME in $settings: wanted lower-case letters, \
digits and '-', a letter first" ;; esac
  case $ACCELERATOR in
    v2-* | v3-* | v4-*) : "${RUNTIME:=tpu-ubuntu2204-base}" ;;
    v5litepod-*) : "${RUNTIME:=v2-alpha-tpuv5-lite}" ;;
    v5p-*) : "${RUNTIME:=v2-alpha-tpuv5}" ;;
    v6e-*) : "${RUNTIME:=v2-alpha-tpuv6e}" ;;
  esac
  need RUNTIME "no version is known for ACCELERATOR=$ACCELERATOR; see 'gcloud compute tpus tpu-vm \
versions list --zone=$ZONE'; TPU7x needs GKE"
  flags=()
  case ${PROVISIONING:=spot} in
    spot | reserved) flags=("--$PROVISIONING") ;;
    on-demand) ;;
    *) die "PROVISIONING=$PROVISIONING in $settings: wanted spot, on-demand or reserved" ;;
  esac
  # shellcheck disable=SC2206  # several words each
  flags+=(${CREATE_FLAGS:-}) ssh_flags=(${SSH_FLAGS:-})
  where=(--quiet "--project=$PROJECT" "--zone=$ZONE")
  folder=tba_jax-$NAME
  $dry_run || command -v gcloud >/dev/null || die "no gcloud here; install the Google Cloud CLI \
(https://cloud.google.com/sdk/docs/install) and run gcloud auth login"
}

# listed COLLECTION FIELD: state of the thing called $NAME; empty if there is none. The exit status of
# `list` says whether the answer can be trusted; that of `describe` does not.
listed() {
  local rows
  rows=$(act gcloud compute tpus "$1" list "${where[@]}" "--format=value(name.basename(),$2)") \
    || die "gcloud could not list the $1. Run 'gcloud auth login'; check PROJECT and ZONE in $settings"
  awk -v name="$NAME" '$1 == name { print $2 }' <<<"$rows"
}

# ABSENT, READY, LOST (gone for good), or the state that `create` waits for.
slice_state() {
  local request node=''
  request=$(listed queued-resources state.state) || return
  if [ "$request" = ACTIVE ]; then node=$(listed tpu-vm state) || return; fi
  case $request:$node in
    :) if $dry_run; then echo "$supposed"; else echo ABSENT; fi ;;
    ACTIVE:READY) echo READY ;;
    # The node of a preempted slice may change before its request does.
    ACTIVE: | ACTIVE:PREEMPTED | ACTIVE:TERMINATED | ACTIVE:DELETING) echo LOST ;;
    SUSPENDING: | SUSPENDED: | FAILED: | DELETING:) echo LOST ;;
    *) echo "${node:-$request}" ;;
  esac
}

create() {
  local state last=''
  state=$(slice_state) || return
  if [ "$state" = LOST ]; then
    say "$NAME was taken away or failed; deleting its remains"
    delete && state=ABSENT || return
  fi
  if [ "$state" = ABSENT ]; then
    act gcloud compute tpus queued-resources create "$NAME" "--node-id=$NAME" "${where[@]}" \
      "--accelerator-type=$ACCELERATOR" "--runtime-version=$RUNTIME" ${flags[@]+"${flags[@]}"} \
      || die "gcloud refused the request; its message is above"
    supposed=READY
  fi
  while true; do
    state=$(slice_state) || return
    case $state in
      READY) say "$NAME is ready" && return ;;
      LOST) die "the request for $NAME failed: 'gcloud compute tpus queued-resources describe $NAME \
--zone=$ZONE --project=$PROJECT' says why" ;;
    esac
    [ "$state" = "$last" ] || say "waiting for $NAME: $state"
    last=$state
    pause
  done
}

delete() {
  local request node
  request=$(listed queued-resources state.state) && node=$(listed tpu-vm state) || return
  if [ -n "$request" ] || $dry_run; then
    act gcloud compute tpus queued-resources delete "$NAME" "${where[@]}" --force || return
  elif [ -n "$node" ]; then # a node without its request still costs money
    act gcloud compute tpus tpu-vm delete "$NAME" "${where[@]}" || return
  fi
  say "there is no $NAME in $ZONE any more"
}

ready() {
  local state
  state=$(slice_state) || exit
  [ "$state" = READY ] || die "$NAME is not ready ($state); launch/tpu.sh create requests it and waits"
}

on_workers() {
  act gcloud compute tpus tpu-vm ssh "$NAME" "${where[@]}" --worker=all \
    '--ssh-flag=-o ConnectTimeout=15' ${ssh_flags[@]+"${ssh_flags[@]}"} "--command=$1"
}
worker() { # a command of worker.sh on every worker
  on_workers "if [ -f $folder/worker.sh ]; then bash $folder/worker.sh$(printf ' %q' "$@"); else echo \
\"\$(hostname) not-set-up\"; fi"
}
report() { # a line for each worker: NAME STATE, and the last line of its log
  worker status || return
  if $dry_run; then echo "worker $1"; fi
}
states_of() { awk 'NF { print $2 }' <<<"$1" | sort -u | tr '\n' ' '; }

setup() {
  local scratch
  case " $(states_of "$(report ready)")" in *' running '*) die "a job is running on $NAME; stop it \
before setup replaces its code" ;; esac
  scratch=$(mktemp -d)
  # shellcheck disable=SC2064  # the folder of now
  trap "rm -rf -- '$scratch'" EXIT
  say "copying $(dirname "$here") to every worker of $NAME"
  act bash "$here/worker.sh" pack "$scratch/code.tar.gz" \
    && on_workers "mkdir -p $folder && chmod 700 $folder" \
    && act gcloud compute tpus tpu-vm scp "$here/worker.sh" "$scratch/code.tar.gz" "$NAME:$folder/" \
      "${where[@]}" --worker=all ${ssh_flags[@]+"${ssh_flags[@]}"} \
    && worker setup "tpu${EXTRAS:+,$EXTRAS}" "${SETUP_COMMAND:-}" && say "set up"
}

# Whether the slice is gone. A job may end a minute before the state of its slice shows why.
is_lost() {
  local state attempt
  for attempt in 1 2 3 4 5; do
    state=$(slice_state) || return 1
    [ "$state" = READY ] || return 0
    if $dry_run || [ "$PROVISIONING" != spot ] || [ "$attempt" = 5 ]; then return 1; fi
    pause
  done
}

# Wait for the end of the job: 0 done, 1 failed or stopped, 75 begin again.
watch() {
  local now last='' failures=0
  say "watching; Ctrl-C ends the watching, not the job (launch/tpu.sh stop does)"
  while true; do
    if now=$(report exited-0); then
      failures=0
      [ "$now" = "$last" ] || while IFS= read -r last; do say "$last"; done <<<"$now"
      last=$now
      case " $(states_of "$now")" in
        ' exited-0 ') return 0 ;;
        *' stopped '*) return 1 ;;
        *' saved '*) if $restart || is_lost; then return 75; else return 1; fi ;; # by a signal
        *' died '* | *' exited-'[1-9]* | *' ready '* | *' not-set-up '*)
          if is_lost; then return 75; else return 1; fi
          ;;
      esac
    elif is_lost; then
      return 75
    elif failures=$((failures + 1)) && [ "$failures" -ge 10 ]; then
      die "the workers do not answer; the job may go on. The same command watches it again"
    fi
    pause
  done
}

run() {
  local outcome
  need JOB "the command that runs on every worker"
  while true; do
    if $restart; then
      create
      case " $(states_of "$(report not-set-up)")" in *' not-set-up '* | ' ')
        setup || { is_lost && continue; } || die "setup failed; the lines above say where"
        ;;
      esac
    fi
    ready
    outcome=0
    case " $(states_of "$(report ready)")" in
      *' not-set-up '*) die "$NAME is not set up; launch/tpu.sh setup" ;;
      ' running ') say "the job is running already" ;;
      *' running '*) worker stop 120 && worker start "$JOB" || outcome=75 ;; # all begin again
      *) worker start "$JOB" || outcome=75 ;;
    esac
    [ $outcome != 0 ] || watch || outcome=$?
    case $outcome in
      0) say "the job is done on every worker" && return ;;
      75) $restart || die "$NAME was taken away; run --restart-on-preemption resumes the job" ;;
      *) say "the same command resumes; the last lines of the log:" && worker logs 20 && return 1 ;;
    esac
  done
}

verb=${1:-help}
for option in "${@:2}"; do
  case $verb:$option in
    *:--dry-run) dry_run=true ;;
    run:--restart-on-preemption) restart=true ;;
    *) die "$verb has no option '$option'; launch/tpu.sh help lists them" ;;
  esac
done
case $verb in
  help) sed -n '3,/^set/ { /^# shell/d; /^#/ s/^# \{0,1\}//p; }' "$0" && exit ;;
  create | setup | run | status | logs | stop | delete) read_settings ;;
  *) die "no verb '$verb'; launch/tpu.sh help lists them" ;;
esac
case $verb in
  create) if $dry_run; then supposed=ABSENT; fi && create ;;
  setup) ready && { setup || die "setup failed; the lines above say where. It may be repeated"; } ;;
  status) say "$NAME: $(slice_state)" && worker status ;;
  logs) ready && worker logs 50 ;;
  stop) ready && worker stop 120 ;;
  run | delete) "$verb" ;;
esac
