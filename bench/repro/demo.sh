#!/usr/bin/env bash
# Two runs with dashcupy and one that goes on from their middle, equal to the bit or exit status 1;
# two runs with each peer (unordered: our kernel without its order); step times, a picture and a
# summary of all.
#   bench/repro/demo.sh FOLDER [options of bench.train_repro]
# Environment: STEPS (300), PEERS (cudnn; of cudnn, flash, sdpa, unordered), PYTHON (python3).
set -euo pipefail
out="$(mkdir -p "${1:?give a folder for the records}" && cd "$1" && pwd)"
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

steps="${STEPS:-300}"
middle=$((steps / 2 + 1)) # past the half: a checkpoint of 1.5 GB is written once, not at the end
weights="$(mktemp -d)"
trap 'rm -rf "$weights"' EXIT

repro() { "${PYTHON:-python3}" -m bench.train_repro "$@"; }

repro "$@" --steps "$steps" --json "$out/dashcupy1.json" \
    --checkpoint-every "$middle" --checkpoint-dir "$weights"
repro "$@" --steps "$steps" --json "$out/dashcupy2.json"
repro "$@" --steps "$steps" --json "$out/resumed.json" \
    --resume "$weights/dashcupy1-step$middle.pt"
pairs=(--compare "$out/dashcupy1.json" "$out/dashcupy2.json"
    --compare "$out/dashcupy1.json" "$out/resumed.json")
equal=0
repro "${pairs[@]}" || equal=$?

for peer in ${PEERS-cudnn}; do
    how=(--attention "$peer")
    [[ "$peer" == unordered ]] && how=(--schedule unordered)
    # A peer that cannot run here must not stop the rest.
    if repro "$@" --steps "$steps" "${how[@]}" --json "$out/${peer}1.json" &&
        repro "$@" --steps "$steps" "${how[@]}" --json "$out/${peer}2.json"; then
        pairs+=(--compare "$out/${peer}1.json" "$out/${peer}2.json")
    fi
done
shown=(--plot "$out/losses.svg" --summary "$out/summary.json")
repro "${pairs[@]}" "${shown[@]}" || true # peers may differ: only ours decide
exit "$equal"
