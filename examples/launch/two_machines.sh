#!/usr/bin/env bash
# Two machines of eight GPUs without a scheduler. Both need this checkout, the same Python packages, a folder that both see
# under the same path, and the same token:
#   export RAY_AUTH_TOKEN=…                                              # on both: any long random text
#   bash examples/launch/two_machines.sh head 10.0.0.1                   # on the first, with its own address
#   bash examples/launch/two_machines.sh worker 10.0.0.1                 # on the second, with that of the first
#   RECIPE=caprl_image RUN_DIR=/shared/runs/captions bash examples/launch/two_machines.sh train 10.0.0.1   # on the first
# With ENGINES=4 before the last command four engines of one GPU sample (rollout.engine vllm or process), and eleven ranks learn.
# After a crash the last command goes on from the last checkpoint. `ray stop` on both ends the cluster.
set -euo pipefail
what=${1:?head, worker or train} address=${2:?the address of the first machine}
shift 2
: "${RAY_AUTH_TOKEN:?set RAY_AUTH_TOKEN to the same text on both machines}"
export RAY_AUTH_MODE=token # without it only the head uses the token
gpus=${GPUS:-8} port=6379

case $what in
  head) # the first GPU is the driver's, which samples: Ray does not see it
    CUDA_VISIBLE_DEVICES=$(seq -s, 1 $((gpus - 1))) ray start --head --node-ip-address="$address" --port=$port \
      --num-gpus=$((gpus - 1)) ;;
  worker) ray start --address="$address:$port" --num-gpus="$gpus" ;;
  train)
    engines=${ENGINES:-0}
    placed=(cluster.learners=$((2 * gpus - 1 - engines)) cluster.placement=ray)
    [ "$engines" -eq 0 ] || placed+=(cluster.engines="$engines")
    CUDA_VISIBLE_DEVICES=0 bash "$(dirname "$0")/train.sh" "${placed[@]}" cluster.address="$address:$port" "$@" ;;
  *) echo "$what: say head, worker or train" >&2 && exit 2 ;;
esac
