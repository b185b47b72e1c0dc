#!/usr/bin/env bash
# Everything that is measured on one NVIDIA H200, in one call of under 10 minutes.
#
#   benchmarks/run_h200.sh [RESULTS_DIR]        default: benchmarks/results
#
# Writes a random 1.7B CustomVoice checkpoint that never ends by itself, then runs the predictor and codec benchmarks and
# serves the checkpoint with plain `vllm serve`: start-up cold and warm, closed loops, Poisson arrivals; every utterance
# is 10 s. Each program's last line (JSON with versions, commit and device) becomes one file. Environment:
#   PYTHON   interpreter of an environment with this package and vLLM (default python3)
#   WORK     scratch folder with 8 GB of room (default: a new one below /tmp)
#   ONLY     some of: predictor codec serving soak (default: these); small (the serving part for 0.6B), clone (first
#            audio of cloned voices, 1.7B Base), profile (where a served step's time goes, and whether the host waits),
#            two (serving with the codec on a second device); correctness instead of speed: tests (those of tests/unit
#            that need the device), kernels (theirs under compute-sanitizer), golden (codes served by both model runners
#            in float32 against the official package's), drift (the predictor's logits in bfloat16)
#   GOLDEN   which golden checkpoints to serve (default: two)
set -euo pipefail
cd "$(dirname "$0")/.."
results=$(mkdir -p "${1:-benchmarks/results}" && cd "${1:-benchmarks/results}" && pwd)
python=${PYTHON:-python3}
work=${WORK:-$(mktemp -d)}
only=${ONLY:-predictor codec serving soak}
port=${PORT:-8199}
export VLLM_PLUGINS=qwen3tts_hw VLLM_NO_USAGE_STATS=1
server=

keep() { # keep NAME: the last line of the log becomes NAME.json
    tail -n 1 "$results/$1.log" > "$results/$1.json"
}

bench() { # bench NAME ARGS...: run one benchmark module, show it, keep its JSON
    local name=$1
    shift
    "$python" -m "$@" 2>&1 | tee "$results/$name.log" || echo "$name failed"
    keep "$name"
}

make_checkpoint() { # make_checkpoint [SIZE [VARIANT]]: its folder is $work/NAME, NAME the size, "base" behind it for Base
    local size=${1:-1.7B} variant=${2:-custom_voice}
    local folder=$work/$size${2:+-$2}
    [ -e "$folder" ] ||
        "$python" -m qwen3tts_hw make-checkpoint --variant "$variant" --size "$size" --no-end-of-speech "$folder"
}

used_mib() {
    nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1
}

bench_loads() { # bench_loads PREFIX: closed loops and Poisson arrivals against the running server
    local load common=(benchmarks.bench_serving --url "http://127.0.0.1:$port" --voice ryan)
    common+=(--body '{"max_new_tokens": 125}')
    for load in 1:16 8:64 64:512 128:1024; do
        bench "$1_c${load%:*}" "${common[@]}" --concurrency "${load%:*}" --requests "${load#*:}"
    done
    bench "$1_r20" "${common[@]}" --concurrency '' --rate 20 --requests 500
}

server_facts() { # starts, and what the device holds beyond the key/value cache, when ready and after the loads
    local cache
    cache=$(grep -aoP 'Available KV cache memory: \K[0-9.]+' "$results/second.server.log" | tail -n 1)
    "$python" -c "
from benchmarks.harness import report
first, second = (float(open(f'$results/{name}.startup').read()) for name in ('first', 'second'))
ready, used = $ready_mib / 1024, $(used_mib) / 1024
report('server', [
    {'start': 'first', 'seconds': first},
    {'start': 'second', 'seconds': second, 'ready_beyond_cache_gib': ready - $cache, 'beyond_cache_gib': used - $cache},
])" | tee "$results/server.log"
    keep server
}

stop_server() {
    [ -z "$server" ] || kill -INT "$server" 2>/dev/null || true
    for _ in $(seq 60); do kill -0 "$server" 2>/dev/null || break; sleep 0.25; done
    [ -z "$server" ] || kill -KILL -- "-$server" 2>/dev/null || true
    server=
}
trap stop_server EXIT

start_server() { # start_server NAME MODEL ARGS...: returns when /health answers; NAME.startup holds the seconds
    local begin name=$1
    shift
    begin=$(date +%s.%N)
    setsid "$python" -m vllm.entrypoints.cli.main serve "$@" --port "$port" > "$results/$name.server.log" 2>&1 &
    server=$!
    until "$python" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/health', timeout=2)" 2>/dev/null; do
        kill -0 "$server" || { tail -n 40 "$results/$name.server.log"; exit 1; }
        sleep 0.2
    done
    "$python" -c "import time; print(round(time.time() - $begin, 1))" | tee "$results/$name.startup"
}

for part in $only; do
    case $part in
        predictor) bench predictor benchmarks.bench_predictor --size 1.7B --rows 1 2 4 8 16 32 64 96 128 ;;
        drift) bench drift benchmarks.bench_drift --size 1.7B ;;
        codec) bench codec benchmarks.bench_codec --size 1.7B --form medium --rows 1 8 32 64 --frames 1 2 4 8 --repeats 20 ;;
        serving)
            make_checkpoint
            start_server first "$work/1.7B"
            stop_server
            start_server second "$work/1.7B"
            ready_mib=$(used_mib)
            bench_loads serving
            "$python" -c "
import urllib.request as u
print(u.urlopen('http://127.0.0.1:$port/v1/audio/stats', timeout=30).read().decode())" | tee "$results/stats.json"
            server_facts
            [[ " $only " == *" soak "* ]] || stop_server
            ;;
        small)
            make_checkpoint 0.6B
            start_server small "$work/0.6B"
            bench_loads small
            stop_server
            ;;
        two)
            make_checkpoint
            QWEN3TTS_CODEC_DEVICE=cuda:1 start_server two "$work/1.7B"
            bench_loads two
            stop_server
            ;;
        clone)
            make_checkpoint 1.7B base
            start_server clone "$work/1.7B-base"
            for seconds in 3 10; do
                bench "clone_${seconds}s" benchmarks.bench_clone --url "http://127.0.0.1:$port" --ref-seconds $seconds \
                    --requests 24
            done
            stop_server
            ;;
        profile)
            make_checkpoint
            start_server profile "$work/1.7B" --profiler-config \
                "{\"profiler\": \"torch\", \"torch_profiler_dir\": \"$work/traces\", \"ignore_frontend\": true, \
                \"torch_profiler_with_stack\": ${STACKS:-true}, \"torch_profiler_dump_cuda_time_total\": false}"
            for concurrency in 64 1; do
                bench "profile_c$concurrency" benchmarks.profile_steps --url "http://127.0.0.1:$port" --voice ryan \
                    --body '{"max_new_tokens": 125}' --traces "$work/traces" --concurrency $concurrency --after-s 0.2
            done
            stop_server
            ;;
        soak)
            make_checkpoint
            [ -n "$server" ] || start_server soak "$work/1.7B"
            bench soak benchmarks.bench_soak --url "http://127.0.0.1:$port" --voice ryan --requests 2000 --concurrency 64
            stop_server
            ;;
        tests)
            "$python" -m pytest -q -p no:cacheprovider -p tests.expected_groups --expect-marker cuda -m "not vllm" \
                tests/unit 2>&1 | tee "$results/tests.log"
            ;;
        golden)
            "$python" scripts/check_golden_server.py --write "$work/golden"
            for key in ${GOLDEN:-custom_voice-tiny-seed0-endless custom_voice-tiny-0.6B-seed0-endless}; do
                for runner in 2 1; do
                    VLLM_USE_V2_MODEL_RUNNER=$((runner - 1)) QWEN3TTS_CODEC_KERNELS=plain start_server "golden-v$runner" "$work/golden/$key" \
                        --dtype float32 --gpu-memory-utilization 0.3
                    "$python" scripts/check_golden_server.py --url "http://127.0.0.1:$port" --checkpoint "$key" |
                        tee "$results/golden-v$runner-$key.json"
                    stop_server
                done
            done
            ;;
        kernels)
            compute-sanitizer --tool memcheck --error-exitcode 1 "$python" -m pytest -q -p no:cacheprovider \
                tests/unit/test_predictor_kernels.py tests/unit/test_codec_kernels.py 2>&1 | tee "$results/kernels.log"
            ;;
    esac
done
