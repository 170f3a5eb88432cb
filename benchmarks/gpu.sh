#!/usr/bin/env bash
# make gpu: run everything that needs a CUDA device, part by part, and time each part.
#
#     make gpu                                     # about an hour on an H200
#     make gpu OUT=/a/folder PARTS="tests train_350m"
#     PYTHON=python3 bash benchmarks/gpu.sh        # with your own installation, without .venv
#
# A part that fails or takes longer than LIMIT seconds does not stop the others; the exit code is
# then 1. The script writes PART.log, results/ and summary.txt to OUT (default runs/gpu).
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-runs/gpu}
LIMIT=${LIMIT:-900}
PARTS=${PARTS:-tests train_350m train_350m_compiled train_1b train_1b_compiled
       papers_atom_size papers_bucketllm papers_masking papers_seamless papers_steps}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

limited() { timeout --kill-after=30 "$LIMIT" "$PYTHON" "$@"; }

part() {
    local one_b=(--model llama_1b --micro-batch-tokens 32768 --rounds 1)
    case $1 in
        tests) limited -m pytest -q -m gpu -p no:cacheprovider --durations=10 tests ;;
        train_350m) limited benchmarks/train.py --model llama_350m ;;
        train_350m_compiled) limited benchmarks/train.py --model llama_350m --rounds 2 --compile ;;
        train_1b) limited benchmarks/train.py "${one_b[@]}" ;;
        train_1b_compiled) limited benchmarks/train.py "${one_b[@]}" --compile ;;
        papers_*) SCALE=gpu ONLY="${1#papers_}" limited benchmarks/papers/all.py ;;
        *) echo "there is no part $1"; return 2 ;;
    esac
}

"$PYTHON" -c 'import sys, torch; torch.cuda.is_available() or sys.exit("torch finds no CUDA device")
print(torch.cuda.get_device_name(), "torch", torch.__version__)' || exit 1

mkdir -p "$OUT/results"
: > "$OUT/summary.txt"
failed=0
for name in $PARTS; do
    echo "== $name"
    stamp=$(mktemp)
    begin=$SECONDS
    part "$name" 2>&1 | tee "$OUT/$name.log"
    code=${PIPESTATUS[0]}
    # Parts write result files of equal names, so copy them before the next part.
    find benchmarks/results -name '*.json' -newer "$stamp" \
        -exec sh -c 'cp "$2" "$0/results/$1-${2##*/}"' "$OUT" "$name" {} \;
    rm -f "$stamp"
    case $code in 0) word=done ;; 124 | 137) word="over $LIMIT s" ;; *) word="failed ($code)" ;; esac
    [[ $code == 0 ]] || failed=1
    printf '%-22s %6d s  %s\n' "$name" $((SECONDS - begin)) "$word" >> "$OUT/summary.txt"
done
echo
cat "$OUT/summary.txt"
exit $failed
