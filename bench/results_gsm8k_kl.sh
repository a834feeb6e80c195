#!/usr/bin/env bash
# GSM8K's runs and the study of β on one GPU: bench/results_gsm8k_kl.sh MODEL DATA OUT [OPTION...]
# MODEL is the model's folder, DATA holds GSM8K's train.jsonl and test.jsonl. Runs that stand beside each other share the GPU,
# so that GRPO and more of the supervised start get the same share of the same minutes.
# MINUTES=6 is what each run of GSM8K trains for, JOBS=5 how many runs of the study of β go at a time; further options go to
# each call of bench/results.py (--tiny: the whole path on a CPU, without the study). It ends with status 1 where a run failed.
set -euo pipefail
model=$1 data=$2 out=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python3}
mkdir -p "$out"

results() {  # LOG ARGUMENT...
  local log="$out/$1.log"
  shift
  "$PYTHON" "$here/results.py" "$@" >"$log" 2>&1 || { echo "results: $1 $2 failed: $log" >&2; return 1; }
}

together() {  # wait for all that were started, and fail where one has
  local status=0 process
  for process in $(jobs -p); do wait "$process" || status=1; done
  return "$status"
}

given=(--model "$model" --data "$data" --out "$out" "$@")
echo "results: supervised starts at $SECONDS s"
results start-gsm8k start gsm8k "${given[@]}" &
results start-countdown start countdown "${given[@]}" &
together

echo "results: GSM8K at $SECONDS s"
beside=(--minutes "${MINUTES:-6}" --beside 2 --set optim.microbatch_tokens=24576 "${given[@]}")
results gsm8k-0 run gsm8k --seed 0 "${beside[@]}" &
results gsm8k-1 run gsm8k --seed 1 "${beside[@]}" &
results more-sft run gsm8k_more_sft --seed 0 "${beside[@]}" &
status=0
together || status=1
case " $* " in *" --tiny "*) exit "$status" ;; esac

starts=("$out"/countdown/warmstart/*.json)
if [ "${#starts[@]}" != 1 ] || [ ! -e "${starts[0]}" ]; then
  echo "results: ${#starts[@]} starts of Countdown in $out/countdown/warmstart, one is needed: give an empty OUT" >&2
  exit 1
fi
start=${starts[0]}
echo "results: the study of β at $SECONDS s, from ${start%.json}"
"$PYTHON" -m keel ablate "$here/../configs/results/kl_beta.yaml" "model.name=${start%.json}" warmstart=null \
  optim.microbatch_tokens=16384 --jobs "${JOBS:-5}" --out "$out/kl" >"$out/ablate.log" 2>&1 || status=1
echo "results: all at $SECONDS s, status $status"
exit "$status"
