#!/usr/bin/env bash
# Two machines of eight GPUs: the driver samples on one GPU, fifteen ranks learn. Submit it from this checkout:
#   RECIPE=caprl_image RUN_DIR=/shared/runs/captions sbatch examples/launch/slurm.sh
# ENGINES=4 has four engines of one GPU sample instead (rollout.engine vllm or process), and eleven ranks learn. Paths in a
# recipe start here, in the checkout: write them from the root.
# A job that is preempted, or whose time is up, is queued again and goes on from its last checkpoint: set checkpoint.every.
#SBATCH --job-name=sensorium
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?run this with sbatch}"
: "${RECIPE:?set RECIPE}" "${RUN_DIR:?set RUN_DIR: a folder that all nodes see}"

gpus=8 port=6379
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]} # this script runs there
engines=${ENGINES:-0} # of those that Ray places
ranks=$((gpus * SLURM_JOB_NUM_NODES - 1 - engines))
placed=(cluster.learners=$ranks cluster.placement=ray)
[ "$engines" -eq 0 ] || placed+=(cluster.engines="$engines")
# Ray asks for a token. Keys of judges and loggers (OPENAI_API_KEY, WANDB_API_KEY) are in the environment of sbatch.
RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(openssl rand -hex 32)}
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token # without the mode only the head of a cluster uses the token

# The first GPU is the driver's: Ray does not see it.
CUDA_VISIBLE_DEVICES=$(seq -s, 1 $((gpus - 1))) ray start --head --port=$port --num-gpus=$((gpus - 1))
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head" ray start --address="$head:$port" --num-gpus=$gpus --block &
fi

again() { # its time is nearly up: end the run in order, and queue the job again
  trap '' TERM
  kill -TERM "$driver" && wait "$driver" || true
  scontrol requeue "$SLURM_JOB_ID"
}
trap again TERM
CUDA_VISIBLE_DEVICES=0 bash examples/launch/train.sh \
  "${placed[@]}" cluster.address=auto cluster.start_s=1800 "$@" &
driver=$!
wait "$driver"
ray stop
