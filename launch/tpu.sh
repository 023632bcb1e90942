#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Train on a TPU VM or a TPU pod: a queued resource and a TPU VM of the same name.
#
#   launch/tpu.sh create|setup|run|status|logs|stop|delete [--dry-run]
#   create   request the slice and wait for it; replace a preempted one
#   setup    copy the working tree to every worker and install it there
#   run      set up what is missing, start JOB on every worker and watch it; again: watch, or resume.
#            With --restart-on-preemption: create, too, also after a preemption
#   stop     the run saves, then ends;   delete   the slice and its disks, which then cost nothing
#
# bash reads the settings from launch/settings.env, or the file named by SETTINGS:
#   NAME=tba-gsm8k PROJECT=my-project ZONE=us-west4-a ACCELERATOR=v5litepod-8
#   JOB='python -m tba_jax.main --config=configs/math.py:gsm8k --workdir=/mnt/runs/gsm8k'
#   PROVISIONING=spot (on-demand, reserved)   RUNTIME=(by ACCELERATOR)   EXTRAS=hub,wandb
#   SETUP_COMMAND=(at the end of setup, like a mount)   CREATE_FLAGS= SSH_FLAGS= (for gcloud)
# With --dry-run nothing runs but printing. Plain bash 3.2, which macOS has.
# shellcheck disable=SC2153  # settings are assigned in the user's file
set -euo pipefail
exec 3>&1 # where --dry-run prints, also from inside $(...)

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
settings=${SETTINGS:-$here/settings.env} dry_run=false restart=false

say() { if $dry_run; then echo "# $*"; else echo "[$(date +%H:%M:%S)] $*"; fi; }
die() { echo "error: $*" >&2 && exit 2; }
act() { # run a command; print it instead in a dry run
  if $dry_run; then printf '+%s\n' "$(printf ' %q' "$@")" >&3; else "$@"; fi
}
tpus() { act gcloud compute tpus "$@" --quiet "--project=$PROJECT" "--zone=$ZONE"; }

read_settings() {
  [ -f "$settings" ] || die "no settings file $settings; launch/tpu.sh help shows an example"
  # shellcheck source=/dev/null
  . "$settings"
  for name in NAME PROJECT ZONE ACCELERATOR; do
    [ -n "${!name:-}" ] || die "$name is not set; set it in $settings (launch/tpu.sh help)"
  done
  case $ACCELERATOR in
    v2-* | v3-* | v4-*) : "${RUNTIME:=tpu-ubuntu2204-base}" ;;
    v5litepod-*) : "${RUNTIME:=v2-alpha-tpuv5-lite}" ;;
    v5p-*) : "${RUNTIME:=v2-alpha-tpuv5}" ;;
    v6e-*) : "${RUNTIME:=v2-alpha-tpuv6e}" ;;
  esac
  [ -n "${RUNTIME:-}" ] || die "set RUNTIME of $ACCELERATOR in $settings (gcloud compute tpus tpu-vm versions list)"
  flags=()
  [ "${PROVISIONING:=spot}" = on-demand ] || flags=("--$PROVISIONING")
  # shellcheck disable=SC2206  # several words each
  flags+=(${CREATE_FLAGS:-}) ssh_flags=(${SSH_FLAGS:-})
  folder=tba_jax-$NAME
}

# listed COLLECTION FIELD: state of the thing called $NAME; empty if there is none. Unlike that of
# `describe`, the exit status of `list` says whether the answer can be trusted.
listed() {
  local rows
  rows=$(tpus "$1" list "--format=value(name.basename(),$2)") \
    || die "gcloud could not list the $1. Run 'gcloud auth login'; check PROJECT and ZONE in $settings"
  awk -v name="$NAME" '$1 == name { print $2 }' <<<"$rows"
}

# ABSENT, READY, LOST (gone for good), or the state that `create` waits for. READY in a dry run.
slice_state() {
  local request node=''
  request=$(listed queued-resources state.state) || return
  if [ "$request" = ACTIVE ]; then node=$(listed tpu-vm state) || return; fi
  case $request:$node in
    :) if $dry_run; then echo READY; else echo ABSENT; fi ;;
    # The node of a preempted slice may change before its request does.
    ACTIVE: | ACTIVE:PREEMPTED | ACTIVE:TERMINATED | *DELETING* | SUSPEND* | FAILED:) echo LOST ;;
    *) echo "${node:-$request}" ;;
  esac
}

create() {
  local state last=''
  state=$(slice_state) || exit
  if [ "$state" = LOST ]; then say "$NAME was taken away or failed" && delete; fi
  case $dry_run:$state in true:* | *:LOST | *:ABSENT)
    tpus queued-resources create "$NAME" "--node-id=$NAME" "--accelerator-type=$ACCELERATOR" \
      "--runtime-version=$RUNTIME" ${flags[@]+"${flags[@]}"} \
      || die "gcloud refused the request; its message is above"
    ;;
  esac
  while true; do
    state=$(slice_state) || exit
    case $state in
      READY) say "$NAME is ready" && return ;;
      LOST) die "the request for $NAME failed; gcloud compute tpus queued-resources describe says why" ;;
      "$last") ;;
      *) say "waiting for $NAME: $state" ;;
    esac
    last=$state
    sleep "${POLL_S:-30}"
  done
}

delete() {
  local request && request=$(listed queued-resources state.state) || exit
  if [ -n "$request" ] || $dry_run; then tpus queued-resources delete "$NAME" --force || exit; fi
  say "there is no $NAME in $ZONE any more"
}

on_workers() {
  tpus tpu-vm ssh "$NAME" --worker=all '--ssh-flag=-o ConnectTimeout=15' \
    ${ssh_flags[@]+"${ssh_flags[@]}"} "--command=$1"
}
worker() { # a command of worker.sh on every worker; of status, a line NAME STATE LAST-LINE-OF-ITS-LOG
  on_workers "if [ -f $folder/worker.sh ]; then bash $folder/worker.sh$(printf ' %q' "$@"); else echo \
\"\$(hostname) not-set-up\"; fi"
}
states_of() { awk 'NF { print $2 }' <<<"$1" | sort -u | tr '\n' ' '; }

setup() {
  case " $(states_of "$(worker status)")" in *' running '*) die "a job is running on $NAME; stop it \
before setup replaces its code" ;; esac
  scratch=$(mktemp -d)
  # shellcheck disable=SC2064  # the folder of now
  trap "rm -rf -- '$scratch'" EXIT
  say "copying $(dirname "$here") to every worker of $NAME"
  # shellcheck disable=SC2015  # an error of any of these ends the setup
  act bash "$here/worker.sh" pack "$scratch/code.tar.gz" \
    && on_workers "mkdir -p $folder && chmod 700 $folder" \
    && tpus tpu-vm scp "$here/worker.sh" "$scratch/code.tar.gz" "$NAME:$folder/" --worker=all \
      ${ssh_flags[@]+"${ssh_flags[@]}"} \
    && worker setup "tpu${EXTRAS:+,$EXTRAS}" "${SETUP_COMMAND:-}" \
    || die "setup failed; the lines above say where. It may be repeated"
  say "set up"
}
status() { say "$NAME: $(slice_state)" && worker status; }
logs() { worker logs 50; }
stop() { worker stop 120; }
# Whether the slice is gone. A job may end a minute before the state of its slice shows why.
is_lost() {
  local state attempt
  for attempt in 1 2 3 4 5; do
    state=$(slice_state) || return 1
    [ "$state" = READY ] || return 0
    if [ "$PROVISIONING" != spot ] || [ "$attempt" = 5 ]; then return 1; fi
    sleep "${POLL_S:-30}"
  done
}

# Wait for the end of the job: 0 done, 1 failed or stopped, 75 begin again.
watch() {
  local now last=''
  say "watching; Ctrl-C ends the watching, not the job (launch/tpu.sh stop does)"
  while true; do
    if now=$(worker status); then
      [ "$now" = "$last" ] || while IFS= read -r last; do say "$last"; done <<<"$now"
      last=$now
      case " $(states_of "$now")" in
        ' exited-0 ') return 0 ;;
        *' stopped '*) return 1 ;;
        ' running ' | ' exited-0 running ') ;;
        *' saved '*) $restart || is_lost || return 1; return 75 ;; # because of a signal
        *) is_lost || return 1; return 75 ;;
      esac
    else
      ! is_lost || return 75
      say "the workers do not answer; the job may go on"
    fi
    sleep "${POLL_S:-30}"
  done
}

run() {
  local now outcome
  [ -n "${JOB:-}" ] || die "JOB is not set; set it in $settings to the command that runs on every worker"
  while true; do
    if $restart; then create; fi
    now=$(slice_state) || exit
    [ "$now" = READY ] || die "$NAME is not ready ($now); launch/tpu.sh create requests it and waits"
    now=" $(states_of "$(worker status)")" outcome=0
    case $now in *' not-set-up '* | ' ')
      (setup) || { $restart && is_lost && continue; } || exit ;;
    esac
    if [ "$now" = ' running ' ]; then say "the job is running already"; else
      worker stop 120 && worker start "$JOB" || outcome=75 # all workers begin together
    fi
    [ $outcome != 0 ] || $dry_run || watch || outcome=$?
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
"$verb"
