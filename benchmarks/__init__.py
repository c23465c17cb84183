"""Speed and memory of the operators beside their peers, one file an operator: `python -m myvision bench`.

In the source tree this directory stands beside the package (`python -m benchmarks` runs it too); installed, it is
`myvision.benchmarks`. A file `bench_<op>.py` has `cases(settings)` and `BARS`; nothing else lists the operators.
"""
