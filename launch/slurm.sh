#!/bin/bash
# Run megapack-pretrain with one task per GPU on several nodes. At Slurm's warning before the time
# limit, the run saves a checkpoint, and this script queues the job again.
#
#   CONFIG=llama_1b_bucket NODES=8 launch/slurm.sh                   # calls sbatch
#   CONFIG=... NODES=8 GPUS_PER_NODE=4 launch/slurm.sh --set optimizer.lr=1e-4
#   CONFIG=... CONTAINER_IMAGE=nvcr.io#nvidia/pytorch:25.06-py3 launch/slurm.sh     # pyxis, enroot
#
# VENV=.venv is the environment with Python; in a container PYTHON=python3 is used instead, and
# CONTAINER_MOUNTS sets the mounts (default: this folder, at the same path).
# SBATCH_* variables are options of sbatch (partition, account, time);
# TASK_OPTIONS="--constraint=h100" adds others.
#
# A job that lost a rank, or got the warning before its first step, is queued again, at most
# MAX_RESTARTS=10 times (megapack-JOB.lost has a line for each). After MAX_STALLED=3 consecutive starts
# without a newer checkpoint (megapack-JOB.stalled) the job is not queued again. The run resumes from
# its newest checkpoint, on any number of nodes.
#SBATCH --job-name=megapack
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -uo pipefail

CONFIG=${CONFIG:?give CONFIG=a file or a recipe}
if [[ -z ${SLURM_JOB_ID:-} ]]; then
    read -r -a options <<<"${TASK_OPTIONS:-}"
    export CONFIG
    exec sbatch --nodes="${NODES:-1}" --ntasks-per-node="${GPUS_PER_NODE:-8}" \
        --gpus-per-node="${GPUS_PER_NODE:-8}" ${options[@]+"${options[@]}"} "$0" "$@"
fi

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
export MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Since Slurm 22.05 a step has one CPU per task unless this is set.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
# A collective that hangs ends the job with an error instead of waiting for the time limit.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1

python=${VENV:-.venv}/bin/python
container=()
if [[ -n ${CONTAINER_IMAGE:-} ]]; then
    python=${PYTHON:-python3}
    container=(--container-image="$CONTAINER_IMAGE" --container-workdir="$PWD"
        --container-mounts="${CONTAINER_MOUNTS:-$PWD:$PWD}")
fi

run_dir=$(srun --nodes=1 --ntasks=1 ${container[@]+"${container[@]}"} \
    "$python" -m megapack.training.command --config "$CONFIG" "$@" | tail -n 1)
newest() { cat "$run_dir/checkpoints/latest" 2>/dev/null; }
before=$(newest)

# Slurm must not kill the other ranks when one ends: their exit code 75 would become 143. They
# detect a lost rank (engine.heartbeat_timeout_seconds); after ten minutes, Slurm kills them.
srun --kill-on-bad-exit=0 --wait=600 ${container[@]+"${container[@]}"} \
    "$python" -m megapack.training.pretrain --config "$CONFIG" "$@"
code=$?

# 75: stopped by a signal after at least one step, and saved. 138: Slurm's warning came during the
# start. 76, 137: a rank or its node was lost; try again a few times. Any other code is final.
again=no
case $code in
    75) again=yes ;;
    76 | 137 | 138)
        lost=megapack-$SLURM_JOB_ID.lost # Slurm's own count includes preemptions
        echo "$(date --iso-8601=seconds) exit status $code" >> "$lost"
        (($(wc -l < "$lost") > ${MAX_RESTARTS:-10})) || again=yes
        ;;
esac
stalled=megapack-$SLURM_JOB_ID.stalled
if [[ $(newest) != "$before" ]]; then
    rm -f "$stalled"
elif [[ $again == yes ]]; then
    echo "$(date --iso-8601=seconds) exit status $code, no checkpoint after ${before:-none}" >> "$stalled"
    if (($(wc -l < "$stalled") >= ${MAX_STALLED:-3})); then
        again=no
        echo "megapack: $(wc -l < "$stalled") starts in a row without a checkpoint: not queued again" >&2
    fi
fi
if [[ $again == yes ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
