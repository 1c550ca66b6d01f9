#!/usr/bin/env bash
# Measure every figure of the README on this machine, and write them into it. Leave the machine alone meanwhile.
# Usage: tools/run_benchmarks.sh [folder of the environment's commands]
set -euo pipefail
cd "$(dirname "$0")/.."
python="${1:-.venv/bin}/python"
mkdir -p .bench benchmarks

"$python" -m pop_engine.tools.bench_builds .bench --json benchmarks/builds.json
"$python" -m pop_engine.tools.bench.cli .bench/pop --against .bench/full --input-len 32,128,512,1024,2048 \
    --output-len 1 --json benchmarks/ttft.json
"$python" -m pop_engine.tools.bench_decode .bench/pop --json benchmarks/decode.json
"$python" -m pop_engine.tools.bench_memory .bench/pop .bench/two-step --prompt examples/lighthouse.txt \
    --json benchmarks/memory.json
"$python" -m pop_engine.tools.figures benchmarks README.md
