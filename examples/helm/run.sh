#!/usr/bin/env bash
# HELM's synthetic reasoning and a custom multiple-choice file, with the full cache, H2O and `best` at
# 20 %: bash run.sh OUT [INSTANCES] [MODEL]. Needs the environment of README.md, and no network.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: bash run.sh OUT [INSTANCES] [MODEL]" >&2; exit 2; }
for needed in h2okv helm-run; do
  command -v "$needed" > /dev/null \
    || { echo "run.sh: $needed is not on PATH; README.md installs it" >&2; exit 2; }
done
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd)
instances=${2:-20}
export HF_HUB_OFFLINE=1 PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
export MODEL OUT="$out"
MODEL=$(python -c 'import sys; from h2okv.models.loading import resolve_model
print(resolve_model(sys.argv[1]))' "${3:-bundled}")

# HELM reads models and tokenizers from prod_env beside where it runs.
mkdir -p "$out/prod_env"
for file in model_deployments tokenizer_configs; do
  python -c 'import os, sys; print(os.path.expandvars(sys.stdin.read()), end="")' \
    < "$here/$file.yaml" > "$out/prod_env/$file.yaml"
done

cd "$out"
entries=()
for model in h2okv/full h2okv/h2o-20 h2okv/h2o-20-whole h2okv/best-20; do
  entries+=("synthetic_reasoning:mode=pattern_match,model=$model")
  entries+=("custom_mcqa:path=$here/questions.jsonl,model=$model")
  entries+=("custom_mcqa:path=$here/questions.jsonl,method=multiple_choice_separate_original,model=$model")
done
helm-run --run-entries "${entries[@]}" --suite h2okv --local-path prod_env \
  --max-eval-instances "$instances" --num-train-trials 1 --num-threads 1 --exit-on-error
python "$here/table.py" benchmark_output/runs/h2okv
