#!/usr/bin/env bash
# Tokenize a corpus on many machines of a Slurm cluster; the result is ONE .bin/.idx.
#
#   launch/tokenize_slurm.sh 16 --input 'corpus/*.jsonl.zst' --tokenizer tokenizer.json \
#       --append-eod --output-prefix data/corpus
# submits an array of 16 tasks, each of which builds every 16th shard with all CPUs of its allocation,
# and one task after it that joins the shards. Inputs and output must be on a shared file system.
# If a task fails, Slurm cancels the joining task; the same command, with any number of tasks,
# continues after the finished shards.
#
# Options of sbatch (partition, account, time) come from SBATCH_* variables, as sbatch reads them;
# TASK_OPTIONS adds others, for example TASK_OPTIONS="--cpus-per-task=32 --mem=64G".
set -euo pipefail

read -r -a build <<<"${MEGAPACK_BUILD:-megapack-build}"

if [[ -n "${SLURM_ARRAY_TASK_ID:-}" ]]; then
    part=$((SLURM_ARRAY_TASK_ID - ${SLURM_ARRAY_TASK_MIN:-0}))
    exec "${build[@]}" tokenize "$@" \
        --part "${part}/${SLURM_ARRAY_TASK_COUNT}" \
        --workers "${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}"
fi

if [[ "${1:-}" == "--finish" ]]; then
    exec "${build[@]}" tokenize "$@" --workers "${SLURM_CPUS_PER_TASK:-1}"
fi

if [[ ! "${1:-}" =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: $0 NUMBER_OF_TASKS (arguments of megapack-build tokenize)" >&2
    exit 2
fi
tasks=$1
shift
read -r -a options <<<"${TASK_OPTIONS:-}"
array=$(sbatch --parsable --job-name=tokenize --array="0-$((tasks - 1))" \
    ${options[@]+"${options[@]}"} "$0" "$@")
finish=$(sbatch --parsable --job-name=tokenize-finish --dependency="afterok:${array%%;*}" \
    --kill-on-invalid-dep=yes "$0" --finish "$@") || {
    scancel "${array%%;*}"
    exit 1
}
echo "array ${array%%;*} (${tasks} tasks), then ${finish%%;*} joins the shards"
