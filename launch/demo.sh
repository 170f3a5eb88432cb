#!/usr/bin/env bash
# Documents -> trained model, on a laptop: two CPU ranks, no network, five minutes. It trains a small
# model on documents packed in buckets (killed halfway and resumed), and on concatenated documents, on
# equally many tokens; then both again with other seeds, to see how much the loss differs by chance.
#   make demo
#   STEPS=400 SEEDS="1 2 3 4" MEGABYTES=64 make demo
# All output is in demo/; a second call starts over.
set -euo pipefail
cd "$(dirname "$0")/.."

MEGABYTES=${MEGABYTES:-8}    # of Python source
STEPS=${STEPS:-64}           # optimizer steps of 4,096 tokens, a multiple of 8
SEEDS=${SEEDS-1 2}           # of the repetitions; the first runs have seed 0
RANKS=2                      # of the first runs
OUT=${OUT:-demo}
BUCKETS=${BUCKETS:-256,512,1024,2048}
PYTHON=${PYTHON:-python}

# All cores divided among the ranks; the CPU is the accelerator.
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
export PYTHONWARNINGS=ignore::FutureWarning  # torch warns of names that DeepSpeed uses

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
megapack-build() { "$PYTHON" -m megapack.cli.main "$@"; }

say "1/8 corpus: the Python source on this disk"
rm -rf "$OUT" && mkdir -p "$OUT"
"$PYTHON" launch/demo_corpus.py --output-dir "$OUT" --max-megabytes "$MEGABYTES"

say "2/8 tokenizer and documents"
megapack-build train-tokenizer --input "$OUT/train.jsonl" --vocab-size 4096 --sample-bytes 8M \
    --output "$OUT/tokenizer.model"
for split in train valid; do
    megapack-build tokenize --input "$OUT/$split.jsonl" --json-key text --append-eod --workers 2 \
        --tokenizer "$OUT/tokenizer.model" --output-prefix "$OUT/$split"
done

say "3/8 samples: buckets, a document is split only if it is longer than the largest one"
megapack-build pack --data-prefix "$OUT/train" --strategy bucket --buckets "$BUCKETS" \
    --output "$OUT/bucket.samples"

say "4/8 samples: concatenate-and-chunk, the usual way"
megapack-build pack --data-prefix "$OUT/train" --strategy concat --buckets "${BUCKETS##*,}" \
    --output "$OUT/concat.samples"
say "all strategies, side by side"
megapack-build compare --data-prefix "$OUT/train" --buckets "$BUCKETS"

# Small steps: one micro step each, with a micro batch of 2,048 tokens per rank.
settings() {
    SETTINGS=(--config demo_cpu --set "run_dir=$OUT/$1" --set "num_steps=$STEPS" \
        --set "data.prefix=$OUT/train" --set "data.index=$OUT/${1%%-*}.samples" \
        --set data.tokens_per_step=4096 --set data.micro_batch_tokens=2048 \
        --set data.micro_step_tokens=4096 \
        --set "data.valid_prefix=$OUT/valid" --set "evaluation.buckets=[$BUCKETS]" \
        --set evaluation.max_tokens=32768 --set "model.tokenizer=$OUT/tokenizer.model")
}
train() {  # on all ranks, with checkpoints and evaluations
    settings "$1"
    deepspeed --num_accelerators "$RANKS" --master_port "${PORT:-29611}" launch/pretrain.py \
        "${SETTINGS[@]}" --set "evaluation.every=$((STEPS / 4))" \
        --set "checkpoint.every=$((STEPS / 8))" "${@:2}"
}
# Settings in which the two differ. With one sample per rank, balance needs samples of similar cost
# (docs/concepts.md); concatenated samples attend across documents, as trainers do by default.
BUCKET=(--set data.cost_window=16)
CONCAT=(--set data.attention=sample --set data.label_boundary=sample --set data.positions=sample)

say "5/8 training on buckets, $RANKS ranks, killed in the middle on purpose"
set -m  # gives the launch its own process group, to kill all of it
train bucket "${BUCKET[@]}" &
launch=$!
"$PYTHON" launch/demo_wait.py --log "$OUT/bucket/log.jsonl" --step $((STEPS * 55 / 100)) --pid "$launch"
kill -9 -- "-$launch"
wait "$launch" 2>/dev/null || true
set +m
cp "$OUT/bucket/log.jsonl" "$OUT/killed.jsonl"
say "the same command again: it resumes from the last checkpoint"
train bucket "${BUCKET[@]}"

say "6/8 training on concatenated documents: attention and labels cross document boundaries"
train concat "${CONCAT[@]}"

# The samples of a step do not depend on the number of ranks, so these runs take one core each.
again() {  # name, seed, settings
    settings "$1-$2"
    "$PYTHON" launch/pretrain.py "${SETTINGS[@]}" --set "seed=$2" \
        --set "evaluation.every=$STEPS" --set "checkpoint.every=$STEPS" --set model.probe=false \
        "${@:3}" >"$OUT/$1-$2.log" 2>&1 && return
    printf '%s\n' "the end of $OUT/$1-$2.log, which failed:" "$(tail -n 20 "$OUT/$1-$2.log")" >&2
    return 1
}
for seed in $SEEDS; do
    say "7/8 both again with seed $seed, at the same time: a minute or two; output in $OUT/*-$seed.log"
    again bucket "$seed" "${BUCKET[@]}" &
    again concat "$seed" "${CONCAT[@]}" || { wait; exit 1; }
    wait $!
done

say "8/8 a plot, and a report on the run"
"$PYTHON" launch/demo_plot.py --demo "$OUT"
megapack-build report "$OUT/bucket"
cat <<EOF

made     $OUT/demo.png            both packings: documents cut, work of the ranks, time, loss by seed
         $OUT/bucket/report.html  the run on one page: what to look at, losses, speed
         $OUT/bucket/model        the trained model and its tokenizer, for transformers' from_pretrained
         $OUT/bucket/log.jsonl    one line per step;  tensorboard --logdir $OUT
         $OUT/bucket.samples      the packed corpus;  $OUT/train.bin/.idx, the documents

next     . .venv/bin/activate
         megapack-build inspect $OUT/bucket.samples --sample 7 --tokenizer $OUT/tokenizer.model
         megapack-build compare --data-prefix $OUT/train --buckets $BUCKETS --html $OUT/report.html
         megapack-build tokenize --help        # your own documents
EOF
