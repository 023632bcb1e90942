#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What tpu.sh and gpu.sh share: options, settings, --dry-run, and the verbs setup, run, status, logs
# and stop. It knows neither gcloud nor ssh. A target defines
#   check_settings            die unless its settings are complete
#   slice_state               print ABSENT, READY, LOST (gone for good), or what it is waiting for
#   on_workers COMMAND        run a command in every worker's home; fail if it fails on one
#   copy_to_workers FILE...   copy files into every worker's ~/$job_dir
#   create_slice, delete_slice
# through act and ask, and the variables target, target_extra, create_help, delete_help and
# may_be_taken_away.
# Invariant: with --dry-run nothing runs but printing. Plain bash 3.2, which macOS has.

# ShellCheck: settings come from the user's file, some variables from the target or go to it.
# shellcheck disable=SC2034,SC2153,SC2154

set -euo pipefail
exec 3>&1 # where --dry-run prints, also from inside $(...)

launch_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tree=$(dirname "$launch_dir")
settings_file=$launch_dir/settings.env
dry_run=false
restart=false
detach=false
follow=false
fleet=''
lines=50
# What --dry-run supposes about the machines.
supposed=READY

say() {
  if $dry_run; then printf '# %s\n' "$*"; else printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*"; fi
}

say_lines() {
  local line
  printf '%s\n' "$1" | while IFS= read -r line; do say "$line"; done
}

die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# A word as any shell reads it back.
quoted() {
  case $1 in
    '') printf "''" ;;
    *[!A-Za-z0-9_./:=,@%+-]*) printf '%s' "$1" | sed "s/'/'\\\\''/g; 1s/^/'/; \$s/\$/'/" ;;
    *) printf '%s' "$1" ;;
  esac
}

show() {
  local word line=''
  for word in "$@"; do line="$line $(quoted "$word")"; done
  printf '+%s\n' "$line" >&3
}

# Run a command; with --dry-run print it instead.
act() {
  if $dry_run; then show "$@"; else "$@"; fi
}

# ask ANSWER COMMAND...: the output of a command; with --dry-run print it and suppose the answer.
ask() {
  local answer=$1
  shift
  if $dry_run; then
    show "$@"
    printf '%s\n' "$answer"
  else
    "$@"
  fi
}

pause() { $dry_run || sleep "$POLL_S"; }

# need NAME MEANING: die unless a setting has a value.
need() {
  [ -n "${!1:-}" ] || die "$1 is not set ($2); set it in $settings_file"
}

usage() {
  cat <<USAGE
usage: launch/$target.sh VERB [--settings=FILE] [--dry-run] [options of the verb]

  create   $create_help
  setup    copy the working tree to every worker and install it there
  run      start the job on every worker and watch it; again: watch, or resume
             --restart-on-preemption   make what is missing (create, setup), and again when it is
                                       taken away
             --detach                  start and do not watch
             --fleet=HOST:PORT         in place of JOB, have every worker join the Ray cluster whose
                                       head is there, for the searchers of a fleet
  status   what the machines and the job are doing
  logs     the job's output, every worker's lines with its name
             --lines=N (50)  --follow
  stop     have the job save and end
  delete   $delete_help

Settings are read from launch/settings.env; launch/settings.env.example explains them.
docs/launch/ says what you should see.
USAGE
}

read_options() {
  verb=${1:-}
  [ $# -eq 0 ] || shift
  case $verb in
    create | setup | run | status | logs | stop | delete) ;;
    '' | help | -h | --help)
      usage
      exit 0
      ;;
    *)
      usage >&2
      die "no verb '$verb'"
      ;;
  esac
  while [ $# -gt 0 ]; do
    case $verb:$1 in
      *:--dry-run) dry_run=true ;;
      *:--settings=*) settings_file=${1#--settings=} ;;
      run:--restart-on-preemption) restart=true ;;
      run:--detach) detach=true ;;
      run:--fleet=*) fleet=${1#--fleet=} ;;
      run:--fleet) die "run --fleet=HOST:PORT: give the head of the Ray cluster to join" ;;
      logs:--follow) follow=true ;;
      logs:--lines=*) lines=${1#--lines=} ;;
      *) die "$verb has no option '$1'; launch/$target.sh help lists them" ;;
    esac
    shift
  done
  case $lines in
    '' | *[!0-9]*) die "--lines=$lines is not a number" ;;
  esac
  if $restart && $detach; then
    die "--restart-on-preemption has to watch the job; leave out --detach (to close the terminal \
meanwhile, run it inside tmux or screen)"
  fi
}

read_settings() {
  [ -f "$settings_file" ] || die "no settings file $settings_file; copy \
$launch_dir/settings.env.example to it and edit, or give --settings=FILE"
  EXTRAS='' SETUP_COMMAND='' JOB_ENV_FILE='' RUNTIME='' CREATE_FLAGS='' SSH_FLAGS=''
  POLL_S=30 CREATE_TIMEOUT_MIN=1440 STOP_TIMEOUT_S=120
  # shellcheck source=/dev/null
  . "$settings_file"
  need NAME "the name of the machines and of the job"
  case $NAME in
    [a-z]*) ;;
    *) die "NAME=$NAME does not begin with a lower-case letter; change it in $settings_file" ;;
  esac
  case $NAME in
    *[!a-z0-9-]*) die "NAME=$NAME: lower-case letters, digits and '-' only; change it in \
$settings_file" ;;
  esac
  job_dir=tba_jax-$NAME
  check_settings
}

# worker VERB ARGUMENT...: the command line of worker.sh on a worker.
worker() {
  local word line="bash $job_dir/worker.sh"
  for word in "$@"; do line="$line $(quoted "$word")"; done
  printf '%s' "$line"
}

# job_report SUPPOSED: one line per worker: NAME STATE, and the last line of the log.
job_report() {
  on_workers "if [ -f $job_dir/worker.sh ]; then $(worker status); \
else echo \"\$(hostname) not-set-up\"; fi" || return
  if $dry_run; then echo "worker $1"; fi
}

# The states in a report, each once.
states_in() { printf '%s\n' "$1" | awk 'NF { print $2 }' | sort -u | tr '\n' ' '; }

# The files that git knows or does not ignore.
archive() {
  local file
  if $dry_run; then
    printf '+ git ls-files --cached --others --exclude-standard -z | tar --null -czf %s -T -\n' \
      "$1" >&3
    return
  fi
  cd "$tree" || return
  git rev-parse --is-inside-work-tree >/dev/null 2>&1 \
    || die "$tree is not a git checkout; setup copies the files that git does not ignore"
  git ls-files --cached --others --exclude-standard -z \
    | while IFS= read -r -d '' file; do if [ -f "$file" ]; then printf '%s\0' "$file"; fi; done \
    | COPYFILE_DISABLE=1 tar --null -czf "$1" -T -
}

setup_workers() {
  local scratch report files
  report=$(job_report not-set-up) || return
  case " $(states_in "$report")" in
    *' running '*) die "a job is running on $NAME; stop it before setup replaces its code" ;;
  esac
  if [ -n "$JOB_ENV_FILE" ] && [ ! -f "$JOB_ENV_FILE" ]; then
    die "JOB_ENV_FILE=$JOB_ENV_FILE is not there; create it, or correct $settings_file"
  fi
  scratch=/tmp/$job_dir
  if ! $dry_run; then
    scratch=$(mktemp -d) || return
    # However this ends: it holds a copy of JOB_ENV_FILE, which has secrets.
    # shellcheck disable=SC2064  # the folder of now
    trap "rm -rf -- '$scratch'" EXIT
  fi
  files=("$launch_dir/worker.sh" "$scratch/code.tar.gz")
  if [ -n "$JOB_ENV_FILE" ]; then
    if ! act cp "$JOB_ENV_FILE" "$scratch/job.env"; then
      $dry_run || rm -rf "$scratch"
      return 1
    fi
    files+=("$scratch/job.env")
  fi
  say "copying $tree to every worker of $NAME"
  {
    archive "$scratch/code.tar.gz" \
      && on_workers "mkdir -p $job_dir && chmod 700 $job_dir" \
      && copy_to_workers "${files[@]}" \
      && on_workers "$(worker setup "$target_extra${EXTRAS:+,$EXTRAS}" "$SETUP_COMMAND")"
  } || {
    $dry_run || rm -rf "$scratch"
    return 1
  }
  $dry_run || rm -rf "$scratch"
  say "set up"
}

# Create and set up what is missing; 1 when that failed on machines that are still there.
prepare() {
  local state report
  while true; do
    state=$(slice_state) || return
    case $state in
      READY)
        report=$(job_report not-set-up) || report=unreachable
        case " $(states_in "$report")" in
          *' not-set-up '*) if setup_workers; then return 0; fi ;;
          *) if [ "$report" != unreachable ]; then return 0; fi ;;
        esac
        pause
        state=$(slice_state) || return
        # Taken away during the setup: begin again.
        [ "$state" != READY ] || return 1
        ;;
      *) create_slice || return ;;
    esac
  done
}

start_job() {
  local report states
  report=$(job_report ready) || return
  states=" $(states_in "$report")"
  case $states in
    *' not-set-up '*) die "$NAME is not set up; launch/$target.sh setup" ;;
    ' running ') say "the job is running already" && return 0 ;;
    *' running '*)
      say "the job runs on some workers only; stopping it there to start it on all"
      on_workers "$(worker stop "$STOP_TIMEOUT_S")" || return
      ;;
  esac
  on_workers "$(worker start "$JOB")"
}

# Watch until the job ends: 0 done, 1 failed or stopped, 75 begin again: the machines were taken away,
# or the job has saved because of a signal of theirs.
watch_job() {
  local report states unreachable=0 last=''
  while true; do
    if report=$(job_report exited-0); then
      unreachable=0
      states=" $(states_in "$report")"
      [ "$report" = "$last" ] || say_lines "$report"
      last=$report
      case $states in
        ' exited-0 ')
          if were_taken_away; then return 75; fi
          return 0
          ;;
        ' saved ' | ' exited-0 saved ')
          say "the job was told to end by a signal, and has saved"
          if were_taken_away || $restart; then return 75; fi
          say "the same command resumes"
          return 1
          ;;
        *' stopped '*)
          say "stopped on request; the same command resumes"
          return 1
          ;;
        *' ready '* | *' not-set-up '*)
          say "another setup or delete has removed the job from a worker"
          return 1
          ;;
        *' died '* | *' exited-'[1-9]*)
          if were_taken_away; then return 75; fi
          return 1
          ;;
      esac
    else
      unreachable=$((unreachable + 1))
      if were_taken_away; then return 75; fi
      if [ "$unreachable" -ge 10 ]; then
        say "the workers do not answer, though the machines are there; the job may well go on. \
The same command watches again"
        return 1
      fi
    fi
    pause
  done
}

# Whether the machines are gone. A job may end a minute before the state of a preempted slice shows
# why, so the question is asked several times.
were_taken_away() {
  local state attempt
  for attempt in 1 2 3 4 5; do
    state=$(slice_state) || return 1
    [ "$state" = READY ] || return 0
    if $dry_run || ! $may_be_taken_away || [ "$attempt" = 5 ]; then return 1; fi
    [ "$attempt" != 1 ] || say "looking whether $NAME is about to be taken away"
    pause
  done
}

run_job() {
  local outcome
  if [ -n "$fleet" ]; then
    case $fleet in
      *[!A-Za-z0-9.:-]* | *: | :*) die "--fleet=$fleet: wanted HOST:PORT" ;;
      *:*[!0-9]*) die "--fleet=$fleet: wanted HOST:PORT" ;;
      *:*) ;;
      *) die "--fleet=$fleet: wanted HOST:PORT" ;;
    esac
    # Until the head is gone, or `stop`; nothing is computed before a driver asks for it.
    JOB="env RAY_USAGE_STATS_ENABLED=0 ray start --address=$fleet --block"
  fi
  need JOB "the command to run on every worker"
  while true; do
    if $restart; then
      prepare || die "$NAME could not be set up; see above"
    else
      require_ready
    fi
    outcome=0
    if start_job; then
      if $detach; then
        say "started; launch/$target.sh status, logs and stop are there for it"
        return 0
      fi
      say "watching; Ctrl-C ends the watching, not the job (launch/$target.sh stop does)"
      watch_job || outcome=$?
    elif were_taken_away; then
      outcome=75
    else
      die "the job could not be started on every worker; the lines above say why"
    fi
    case $outcome in
      0)
        say "the job is done on every worker"
        show_restart
        return 0
        ;;
      75)
        $restart || die "$NAME was taken away; launch/$target.sh run --restart-on-preemption makes \
it anew and resumes from the work directory"
        say "resuming"
        ;;
      *)
        say "the last lines of the log:"
        lines=20
        show_logs || true
        return 1
        ;;
    esac
  done
}

# --dry-run: what a preemption would add.
show_restart() {
  if $dry_run && $restart; then
    say "after a preemption, before the job is started again:"
    supposed=LOST
    create_slice
    setup_workers
  fi
}

require_ready() {
  local state
  state=$(slice_state) || exit
  case $state in
    READY) ;;
    ABSENT) die "$NAME does not exist; launch/$target.sh create" ;;
    LOST) die "$NAME was taken away or failed; launch/$target.sh create makes it anew" ;;
    *) die "$NAME is not ready ($state); launch/$target.sh create waits for it" ;;
  esac
}

show_logs() {
  if $follow; then
    on_workers "$(worker logs "$lines" follow)"
  else
    on_workers "$(worker logs "$lines")"
  fi
}

main() {
  read_options "$@"
  read_settings
  local state report
  case $verb in
    create) create_slice ;;
    setup)
      require_ready
      setup_workers || die "setup failed; the lines above say where. It may be run again"
      ;;
    run) run_job ;;
    status)
      state=$(slice_state) || exit
      say "$NAME: $state"
      [ "$state" != READY ] || report=$(job_report running) || exit
      [ "$state" != READY ] || say_lines "$report"
      ;;
    logs)
      require_ready
      show_logs
      ;;
    stop)
      state=$(slice_state) || exit
      if [ "$state" = READY ]; then
        on_workers "if [ -f $job_dir/worker.sh ]; then $(worker stop "$STOP_TIMEOUT_S"); fi"
      else
        say "nothing to stop ($NAME: $state)"
      fi
      ;;
    delete) delete_slice ;;
  esac
}
