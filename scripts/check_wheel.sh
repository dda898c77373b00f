#!/usr/bin/env bash
# Installs a wheel into an empty environment and uses it outside the repository.
# Usage: check_wheel.sh PYTHON WHEEL   (PIP_ARGS: further options for pip)
set -euo pipefail
python=$1
wheel=$(realpath "$2")
constraints=$(realpath "$(dirname "$0")/../constraints.txt")
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"

"$python" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS is a list of options
venv/bin/python -m pip install --quiet --disable-pip-version-check ${PIP_ARGS:-} \
    -c "$constraints" "$wheel"
export HF_HUB_OFFLINE=1
venv/bin/h2okv generate --budget 32+32 --max-new-tokens 24 "The old man looked at the sea and"
venv/bin/h2okv generate --budget 32+32 --max-new-tokens 24 --json "The old man looked at the sea and" \
    | venv/bin/python -m json.tool > /dev/null
venv/bin/h2okv demo
printf 'The sea was calm that night.\n%.0s' $(seq 100) > text.txt
venv/bin/h2okv stream --text text.txt --budget 32+32 --every 200 --csv rows.csv
venv/bin/h2okv eval perplexity --text text.txt --length 128 --windows 1 --csv perplexity.csv
printf 'Who are you?\n/cache\n' | venv/bin/h2okv chat --budget 32+32 --max-new-tokens 8
venv/bin/h2okv view --text text.txt --export kept.html --tokens 200
echo "the wheel works outside the repository: $(basename "$wheel")"
