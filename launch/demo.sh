#!/usr/bin/env bash
# Documents -> trained model, on a laptop: two CPU ranks, about eight minutes, no network.
#   make demo                       all of it
#   STEPS=400 MEGABYTES=64 make demo
# Everything it makes lies in demo/; a second call starts over.
set -euo pipefail
cd "$(dirname "$0")/.."

MEGABYTES=${MEGABYTES:-32}   # of Python source
STEPS=${STEPS:-160}          # optimizer steps
RANKS=${RANKS:-2}
OUT=${OUT:-demo}
BUCKETS=${BUCKETS:-512,1024,2048,4096}
PYTHON=${PYTHON:-python}

# All cores divided among the ranks; the CPU is the accelerator.
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
export PYTHONWARNINGS=ignore::FutureWarning  # torch about names that DeepSpeed uses

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
megapack-build() { "$PYTHON" -m megapack.cli.main "$@"; }

say "1/7 corpus: the Python source on this disk"
rm -rf "$OUT" && mkdir -p "$OUT"
"$PYTHON" launch/demo_corpus.py --output-dir "$OUT" --max-megabytes "$MEGABYTES"

say "2/7 tokenizer and documents"
megapack-build train-tokenizer --input "$OUT/train.jsonl" --vocab-size 8192 --sample-bytes 8M \
    --output "$OUT/tokenizer.model"
for split in train valid; do
    megapack-build tokenize --input "$OUT/$split.jsonl" --json-key text --append-eod --workers 2 \
        --tokenizer "$OUT/tokenizer.model" --output-prefix "$OUT/$split"
done

say "3/7 samples: concatenate-and-chunk, the usual way"
megapack-build pack --data-prefix "$OUT/train" --strategy concat --buckets 4096 \
    --output "$OUT/train.concat.samples"

say "4/7 samples: buckets, a document is split only if it is longer than the largest"
megapack-build pack --data-prefix "$OUT/train" --strategy bucket --buckets "$BUCKETS" \
    --output "$OUT/train.samples"
say "all strategies, side by side"
megapack-build compare --data-prefix "$OUT/train" --buckets "$BUCKETS"

train() {
    deepspeed --num_accelerators "$RANKS" --master_port "${PORT:-29611}" launch/pretrain.py \
        --config demo_cpu --set "run_dir=$OUT/run" --set "num_steps=$STEPS" \
        --set "data.prefix=$OUT/train" --set "data.index=$OUT/train.samples" \
        --set "data.valid_prefix=$OUT/valid" --set "checkpoint.every=$((STEPS / 8))" \
        --set "model.tokenizer=$OUT/tokenizer.model"
}

say "5/7 training on $RANKS ranks, killed in the middle on purpose"
set -m  # the launch gets a process group of its own, so that all of it can be killed
train &
launch=$!
"$PYTHON" launch/demo_wait.py --log "$OUT/run/log.jsonl" --step $((STEPS * 55 / 100)) --pid "$launch"
kill -9 -- "-$launch"
wait "$launch" 2>/dev/null || true
set +m
cp "$OUT/run/log.jsonl" "$OUT/killed.jsonl"

say "6/7 the same command again: it resumes from the last checkpoint"
train

say "7/7 the picture"
"$PYTHON" launch/demo_plot.py --run-dir "$OUT/run" --data-prefix "$OUT/train" \
    --killed-log "$OUT/killed.jsonl" --samples "$OUT/train.samples" --output "$OUT/demo.png"
cat <<EOF

made     $OUT/demo.png        loss, bucket of every step, document lengths
         $OUT/run/model       the trained model and its tokenizer, for transformers' from_pretrained
         $OUT/run/log.jsonl   one line per step;  tensorboard --logdir $OUT/run
         $OUT/train.samples   the packed corpus;  $OUT/train.bin/.idx, the documents

next     . .venv/bin/activate
         megapack-build inspect $OUT/train.samples --sample 7 --tokenizer $OUT/tokenizer.model
         megapack-build compare --data-prefix $OUT/train --buckets $BUCKETS --html $OUT/report.html
         megapack-build tokenize --help        # your own documents
EOF
