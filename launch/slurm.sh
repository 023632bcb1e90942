#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# A fleet on GPU nodes of a Slurm cluster: `ray symmetric-run` makes a Ray cluster of the job's nodes,
# runs the command on the first of them, and ends it all afterwards.
#
#   sbatch launch/slurm.sh                  from the working tree; again: resume
#   DRY_RUN=1 bash launch/slurm.sh          print the command. Nobody has run this on a cluster.
#SBATCH --job-name=tba-fleet --nodes=5 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=32
#SBATCH --time=24:00:00 --requeue --signal=TERM@120 --output=fleet-%j.log --open-mode=append
set -euo pipefail

# The trainer has the GPUs of one node; searchers, eight to a process, have the other nodes.
job=(python -m tba_jax.main --config=configs/math.py:gsm8k "--workdir=${WORKDIR:-$HOME/runs/gsm8k}"
  --config.placement=fleet --config.fleet.address=auto
  --config.fleet.trainer=GPU=8 --config.mesh.fsdp=8 --config.batch.num_prompts=16
  --config.fleet.searcher=GPU=8 --config.num_searchers=8
  "--config.fleet.max_searchers=$((8 * (${SLURM_JOB_NUM_NODES:-5} - 1)))")
head=localhost
[ -z "${SLURM_JOB_NODELIST:-}" ] || head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
whole=(srun --label --kill-on-bad-exit=0 env RAY_USAGE_STATS_ENABLED=0 ray symmetric-run
  "--address=$head:6379" --min-nodes 2 -- "${job[@]}")
[ -z "${DRY_RUN:-}" ] || { printf '%q ' "${whole[@]}" && exit; }
# shellcheck source=/dev/null
[ ! -f .venv/bin/activate ] || . .venv/bin/activate
exec "${whole[@]}"
