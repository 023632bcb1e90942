#!/bin/bash
# One process on each node of a Slurm job, on a shared file system (docs/launch/clusters.md):
#   sbatch --nodes=4 launch/slurm.sh tba_jax.main --config=configs/math.py:gsm8k --workdir=RUN
#SBATCH --job-name=tba --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=32
#SBATCH --time=24:00:00 --requeue --signal=TERM@120 --output=tba-%j.log --open-mode=append
set -euo pipefail
[ $# -gt 0 ] || { echo "slurm.sh: give a module and its flags, tba_jax.main --config=..." >&2; exit 2; }
cd "${SLURM_SUBMIT_DIR:?start this script with sbatch}"
# shellcheck source=/dev/null
if [ -d .venv ]; then . .venv/bin/activate; fi
JAX_COORDINATOR_ADDRESS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):12345
export JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES=$SLURM_NTASKS
# shellcheck disable=SC2016 # the shell of each task fills in its number
exec srun --label --kill-on-bad-exit=1 \
  bash -c 'JAX_PROCESS_ID=$SLURM_PROCID exec python -m "$@"' task "$@"
