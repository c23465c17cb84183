"""tools/new_op.py: what it writes builds and passes its own tests, and what it cannot write it refuses."""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY, load_script
from torch.utils import cpp_extension

new_op = load_script(REPOSITORY / "tools" / "new_op.py")
setup_script = load_script(REPOSITORY / "setup.py")

REFUSED = {
    "MyScale": ("Tensor x", "the name must be lower_case_with_underscores, such as my_scale, but is 'MyScale'"),
    "union": ("Tensor x", "the name must not be a word of Python's or C++'s own, but is 'union'"),
    "broadcast": ("Tensor x", "the name must not be that of a function in csrc/common, but 'broadcast' is one"),
    "my_add": ("Tensor x", "my_add exists already: benchmarks/bench_my_add.py"),
    "no_tensor": ("float s", "an element-wise operator has 1 to 5 tensors, but got 0"),
    "six_tensors": (", ".join(f"Tensor {name}" for name in "abcdef"), "has 1 to 5 tensors, but got 6"),
    "order": ("float s, Tensor x", "the tensors come first, then the numbers, but got 'float s, Tensor x'"),
    "optional": ("Tensor x, Tensor? y", "Tensor? is for what may be absent, which element-wise operators do not have"),
    "listed": ("Tensor x, int[2] size", "the types are Tensor, float, int and bool, but size is int[2]"),
    "typed": ("Tensor x, str mode", "the types are Tensor, float, int and bool, but mode is str"),
    "defaulted": ("Tensor x, float s=1.0", "a schema has no defaults: give s its own in the Python function"),
    "nameless": ("Tensor", "an argument is a type and a name, as in \"Tensor x, float s\", but got 'Tensor'"),
    "twice": ("Tensor x, float x", "each argument needs a name of its own, but got x, x"),
    "reserved": ("Tensor x, float lambda", "an argument must not be a word of Python's or C++'s own"),
    "taken": ("Tensor x, float params", "an argument must not be 'params', which means something else"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_write_is_told(name: str):
    schema, message = REFUSED[name]
    with pytest.raises(SystemExit) as refusal:
        new_op.main([name, schema])
    assert str(refusal.value).startswith("new_op: error: ")
    assert message in str(refusal.value)


def test_my_add_is_what_the_templates_write():
    """But for its formula, in each of these files a line or two."""
    operator = new_op.Operator("my_add", new_op.parse_schema("Tensor x, Tensor y"), "output = 2 * x + y")
    for path, text in new_op.new_files(operator).items():
        if path.is_relative_to(REPOSITORY / "csrc"):
            lines = path.read_text().splitlines(), text.splitlines()
            added = [line for line in difflib.ndiff(*lines) if line.startswith("- ")]
            assert len(added) <= 2, (path, added)


def copy_of_the_tree(to: Path) -> Path:
    """Without the operators' kernels, which the test takes from the build of the tree itself."""
    for name in ("benchmarks", "csrc", "myvision", "tests", "tools"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "ops" if name == "csrc" else "")
        shutil.copytree(REPOSITORY / name, to / name, ignore=ignored)
    for name in ("README.md", "CHANGELOG.md", "setup.py", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, to)
    return to


def run(*command: str | Path, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(cwd), str(cwd / "tests")])}
    result = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build_library(tree: Path, op: str) -> None:
    """Links the objects of this tree's build with those of the new operator, the only ones that are compiled."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = setup_script.flags_of(setup_script.check_compiler())
    includes = [f"-I{path}" for path in (tree / "csrc", *cpp_extension.include_paths("cpu"))]
    built = ["-DMYVISION_CPU_X86"] if len(setup_script.INSTRUCTION_SETS) > 1 else []
    directory = tree / "csrc" / "ops" / op
    kernels = directory / f"{op}_cpu.cpp"
    jobs = [(kernels, name, flags.kernels(name, str(kernels))) for name in setup_script.INSTRUCTION_SETS]
    objects = []
    for source, name, options in [(directory / f"{op}.cpp", "glue", flags.all() + built), *jobs]:
        objects.append(tree / f"{name}.o")
        run(*compiler, *options, "-O1", "-fPIC", *includes, "-c", source, "-o", objects[-1], cwd=tree)
    build = REPOSITORY / "build" / "objects"
    others = setup_script.sources("common/*.cpp") + setup_script.operator_glue()
    objects += [(build / "myvision._C" / source).with_suffix(".o") for source in others]
    for name in setup_script.INSTRUCTION_SETS:
        objects += [(build / name / source).with_suffix(".o") for source in setup_script.sources("ops/**/*_cpu.cpp")]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths("cpu")]
    run(*compiler, "-shared", *objects, *libraries, "-ltorch_cpu", "-o", tree / "myvision" / "_C.so", cwd=tree)


@pytest.mark.exhaustive  # a minute of compiling
@pytest.mark.skipif(sys.platform != "linux", reason="links as on Linux")
@pytest.mark.parametrize(
    "schema", ["Tensor x, Tensor y, Tensor z, float s, int n, bool flag", "Tensor x, int n"], ids=["mix", "integers"]
)
def test_a_new_operator_builds_and_passes_its_tests(tmp_path: Path, schema: str):
    if not (REPOSITORY / "build" / "objects" / "myvision._C").is_dir():
        pytest.skip("needs the objects of a build in place")
    tree = copy_of_the_tree(tmp_path)
    printed = run(sys.executable, "tools/new_op.py", "my_mix", schema, "--summary", "a mix", cwd=tree)
    assert "csrc/ops/my_mix/my_mix_kernel.cuh" in printed
    assert "| `ops.my_mix` | `nn.MyMix` | a mix |" in (tree / "README.md").read_text()
    assert "- `my_mix`: a mix.\n" in (tree / "CHANGELOG.md").read_text()
    build_library(tree, "my_mix")
    pytest_of_tree = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    run(*pytest_of_tree, "tests/test_my_mix.py", "-k", "not emulated_64", cwd=tree)
    run(*pytest_of_tree, "tests/test_rooms.py", "tests/test_gpu.py", "-k", "my_mix or is_called", cwd=tree)
    run(*pytest_of_tree, "--doctest-modules", "myvision/ops/my_mix.py", cwd=tree)
    assert "my_mix, large" in run(sys.executable, "-m", "benchmarks", "--quick", "--ops", "my_mix", cwd=tree)
    if ruff := shutil.which("ruff"):
        run(ruff, "check", ".", cwd=tree)
        run(ruff, "format", "--check", ".", cwd=tree)
