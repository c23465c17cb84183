"""Call every operator on the GPU with small inputs, for compute-sanitizer, under which kernels are slow.

python tests/exercise_gpu.py
"""

from __future__ import annotations

import torch
from deform_conv2d_cases import CASES
from helpers import FLOATING_DTYPES
from test_gpu import CALLS, Call


def main() -> None:
    convolutions = [Call(case.tensors, case.run) for case in CASES if case.mask and case.bias]
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        for dtype in FLOATING_DTYPES:
            for call in [*CALLS.values(), *convolutions]:
                call.results(call.inputs(dtype, "cuda"))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
