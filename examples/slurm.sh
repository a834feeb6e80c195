#!/bin/bash
# Several machines under Slurm: one torchrun a node, and a process a GPU. Sent again, it goes on where it was stopped.
#   sbatch --nodes 4 examples/slurm.sh configs/default.yaml run.name=large
#SBATCH --job-name=keel
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --open-mode=append
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=570  # the step in flight and its checkpoint have this long after the signal

exec srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:${PORT:-29500}" \
  -m keel train "$@" run.if_exists=resume
