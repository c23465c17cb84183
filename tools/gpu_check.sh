#!/usr/bin/env bash
# Everything that takes a GPU, in 8 minutes at most on 16 cores: builds myvision in place, runs its GPU tests, looks for
# bad memory accesses and races, and measures speed beside torch and torchvision.
#
#   tools/gpu_check.sh [DIRECTORY]     results, one log a step: report.md, report.json; default: build/gpu_check
#
# Installed must be: a C++20 compiler, nvcc of the CUDA release that torch is built for and, for $PYTHON (python3 where
# that is not set), torch >= 2.11, setuptools, ninja and what the extra "test" of pyproject.toml lists. Where
# compute-sanitizer is found and works it is used. Nothing is downloaded.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

python=${PYTHON:-python3}
mkdir -p "${1:-build/gpu_check}"
out=$(cd "${1:-build/gpu_check}" && pwd)
seconds_allowed=450  # what is left of the 8 minutes is for the end of the last step
export PYTHONPATH=$PWD
# The toolkit that the build finds, with compute-sanitizer.
PATH=$PATH:$("$python" -c 'import setup, torch; print(setup.find_cuda_home(torch.version.cuda))')/bin
export MYVISION_REQUIRE_GPU=1 FORCE_CUDA=1
export NVIDIA_TF32_OVERRIDE=0  # float32 means float32, for the peers and for the formulas that tests compare with

# record NAME OUTCOME SECONDS
record() {
  printf '%s\t%s\t%d\n' "$@" >>"$out/steps.tsv"
  printf '%-20s %s (%d s)\n' "$@"
}

# step NAME SECONDS COMMAND...: runs the command for so long at most, with a log, and records how it went.
step() {
  local name=$1 limit=$2 start=$SECONDS left=$((seconds_allowed - SECONDS)) status
  shift 2
  if ((left <= 0)); then
    record "$name" "no time left" 0
    return 1
  fi
  timeout --kill-after=5 "$((limit < left ? limit : left))" "$@" &>"$out/$name.log"
  status=$?
  case $status in
    0) record "$name" passed $((SECONDS - start)) ;;
    124 | 137) record "$name" "out of time" $((SECONDS - start)) ;;
    *) record "$name" failed $((SECONDS - start)) ;;
  esac
  ((status == 0)) || tail -n 20 "$out/$name.log"
  return $status
}

# With status 9 where it finds something in one of myvision's kernels. Without torch's cache each tensor is an
# allocation of its own, whose end memcheck knows.
sanitizer=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --target-processes all --kernel-name kns=myvision
  --report-api-errors no --error-exitcode 9)

finds_planted_bug() {
  timeout 30 "${sanitizer[@]}" --tool "$1" "$out/planted_bugs" &>"$out/planted_bugs.log"
  (($? == 9))
}

# sanitize TOOL
sanitize() {
  if finds_planted_bug "$1"; then
    step "$1" 100 "${sanitizer[@]}" --tool "$1" "$python" tests/exercise_gpu.py
  else
    record "$1" "does not work here" 0
  fi
}

rm -f "$out"/{steps.tsv,environment.json,results.json}  # of an earlier run
if step build 180 "$python" setup.py build_ext --inplace; then
  "$python" -m myvision env --json >"$out/environment.json"
  step gpu-tests 90 "$python" -m pytest --all -m gpu tests/test_gpu.py
  step operator-tests 150 "$python" -m pytest --all -m gpu -n 8 --ignore tests/test_gpu.py
  step benchmarks 120 "$python" -m myvision bench --device cuda --seconds 0.3 --out "$out"
  if step planted-bugs 30 nvcc -arch=native -o "$out/planted_bugs" tools/planted_bugs.cu; then
    sanitize memcheck
    sanitize racecheck
  fi
fi
"$python" tools/gpu_report.py "$out"
