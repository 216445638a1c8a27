#!/bin/bash
# The parts for a GPU, one after another, on a machine that is lent for minutes:
#
#     OUT=/tmp/out bash bench/gpu/go.sh facts start:240 "copies kernels scattered:200" sweep:120
#
# Each argument is a part, or several parts of one process, and the most seconds that it may take (300 without a number).
# A part that fails or takes too long is ended, and the next one runs. $OUT gets the log of each part as it goes, and what
# it has measured. Without an argument, it says which parts there are.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
OUT=${OUT:-$root/build/gpu/out} SITE=${SITE:-/tmp/lmc-gpu-site} CACHE=${CACHE:-/tmp/lmc-gpu-cache}
PYTHON=${PYTHON:-python3} KEEP=--keep SMOKE=${SMOKE:+--smoke} EAGER=${EAGER:+--eager}
[ -z "$SMOKE" ] || KEEP= # Sizes for a CPU are no result.
[ -w "${HOME:-}" ] || export HOME=$CACHE
export TRITON_CACHE_DIR=$CACHE/triton VLLM_CACHE_ROOT=$CACHE/vllm
export TORCHINDUCTOR_CACHE_DIR=$CACHE/inductor PYTHONPATH=$root:$SITE PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 TOKENIZERS_PARALLELISM=false
kit=$root/build/gpu/kit

if [ $# = 0 ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    echo "Parts: those of bench/gpu/accept.py, which its first lines name, and facts, sweep, traces_transformers,"
    echo "traces_vllm, sanitize, and caches, which keeps what was compiled for the next machine of this kind."
    exit 2
fi
mkdir -p "$OUT" "$CACHE" && cd "$root/bench" || exit 1

run() { # name, seconds, command
    local name=$1 most=$2 began=$SECONDS status
    shift 2
    echo "=== $name, at most $most s"
    timeout -k 5 "$most" "$@" 2>&1 | grep --line-buffered -v -E 'USDT:|it/s\]' | tee "$OUT/$name.log"
    status=${PIPESTATUS[0]}
    echo "=== $name: status $status, $((SECONDS - began)) s" | tee -a "$OUT/$name.log"
    cp results/gpu_*.json "$OUT/" 2>/dev/null
    return "$status"
}

facts() {
    nvidia-smi
    nvidia-smi --query-gpu=name,memory.total,clocks.sm,clocks.mem,pcie.link.gen.current,pcie.link.width.current --format=csv
    free -g
    nproc
    grep -m1 'model name' /proc/cpuinfo
    df -h /tmp /dev/shm
    echo "page-locked memory at most: $(ulimit -l)"
    "$PYTHON" -VV
    "$PYTHON" -m pip list 2>/dev/null | grep -i -E '^(torch|triton|transformers|numpy|vllm|pydantic) '
    # Some machines give memory only to those who use it, and lmc looks at what is free.
    "$PYTHON" -c "import torch; torch.ones(${GROW:-28} << 30, dtype=torch.uint8)" && free -g | sed -n 2p
}

if [ -e "$kit/parts.json" ] && [ ! -e "$SITE/whole" ]; then
    "$PYTHON" -m gpu.pack unpack --kit "$kit" --into "$SITE" && touch "$SITE/whole"
fi
if [ -e "$kit/caches.part-aa" ] && [ ! -e "$CACHE/unpacked" ]; then
    cat "$kit"/caches.part-* | tar xz -C "$CACHE" && touch "$CACHE/unpacked"
fi
for wanted in "$@"; do
    parts=${wanted%%:*} most=${wanted##*:}
    [ "$most" = "$wanted" ] && most=300
    name=${parts// /-}
    case $parts in
        facts) run facts "$most" bash -c "$(declare -f facts); PYTHON=$PYTHON GROW=${GROW:-28} facts" ;;
        sweep) run sweep "$most" "$PYTHON" -m gpu.sweep $KEEP --seconds $((most - 20)) $SMOKE ;;
        traces_transformers) run "$parts" "$most" "$PYTHON" -m gpu.traces transformers --out "$OUT" $SMOKE ;;
        traces_vllm) run "$parts" "$most" "$PYTHON" -m gpu.traces vllm --out "$OUT" $SMOKE $EAGER ;;
        sanitize)
            tool=$(command -v compute-sanitizer || true)
            run sanitize "$most" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 $tool "$PYTHON" -m gpu.sanitize
            ;;
        caches) # Single files of more than 16 MiB often do not come back. Those that were cut off are of no use.
            run caches "$most" bash -c 'set -o pipefail; tar cz -C "$0" . | split -b 15M - "$1/caches.part-"' \
                "$CACHE" "$OUT" || rm -f "$OUT"/caches.part-*
            ;;
        *) run "$name" "$most" "$PYTHON" -m gpu.accept $KEEP $SMOKE $EAGER $(printf -- '--part %s ' $parts) ;;
    esac
done
echo
echo "=== What fell short or failed:"
grep -h -E 'FALLS SHORT|Error|=== .*status [^0]' "$OUT"/*.log | cut -c1-200 | tail -n 40
ls -la "$OUT"
