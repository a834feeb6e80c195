"""No Triton kernel loads and stores one pointer, but for those listed here: another warp may store before one loads.

Pointers are compared by the kernel's own names. Two names may be one tensor only where a launch passes it twice:
`vocabulary.gradient` does, as `logits` and `out`, and that kernel stores behind a barrier.
"""

import ast
from pathlib import Path

import pytest

import keel

SOURCES = [p for p in Path(keel.__file__).parent.rglob("*.py") if "@triton.jit" in p.read_text()]
ALLOWED = {
    "_suffix_kernel": {"anchor", "part", "part_lse"},  # never the same cells: see its docstring
    "_draw_kernel": {"positions", "left", "lengths"},  # a row's own numbers, stored behind a barrier
}


def base(node, local):
    """The kernel's argument that a pointer expression begins with."""
    while isinstance(node, ast.BinOp):
        node = node.left
    return local.get(node.id, node.id) if isinstance(node, ast.Name) else None


def touched(function, functions):
    """The arguments that a function loads from and stores to, those of the functions that it calls included."""
    local, loads, stores = {}, set(), set()
    pointers = (ast.BinOp, ast.Name)
    assigned = (
        node for node in ast.walk(function) if isinstance(node, ast.Assign) and isinstance(node.value, pointers)
    )
    for node in sorted(assigned, key=lambda node: node.lineno):
        for target in node.targets:
            if isinstance(target, ast.Name) and (name := base(node.value, local)) and name != target.id:
                local[target.id] = name
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in ("tl.load", "tl.store") or name.startswith("tl.atomic_"):
            pointer = next((k.value for k in node.keywords if k.arg == "pointer"), None) or node.args[0]
            loads |= {base(pointer, local)} if name != "tl.store" else set()
            stores |= {base(pointer, local)} if name != "tl.load" else set()
        elif name in functions:
            parameters = [argument.arg for argument in functions[name].args.args]
            given = dict(zip(parameters, (base(argument, local) for argument in node.args), strict=False))
            inner_loads, inner_stores = touched(functions[name], functions)
            loads |= {given.get(argument) for argument in inner_loads}
            stores |= {given.get(argument) for argument in inner_stores}
    return loads - {None}, stores - {None}


def kernels_of(text):
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    jitted = {n: f for n, f in functions.items() if any("triton.jit" in ast.unparse(d) for d in f.decorator_list)}
    return {name: touched(function, jitted) for name, function in jitted.items() if name.endswith("_kernel")}


def test_what_a_kernel_loads_it_does_not_store():
    found = {name: touched for path in SOURCES for name, touched in kernels_of(path.read_text()).items()}
    assert len(found) >= 13
    assert all(loads and stores for loads, stores in found.values())
    assert {name: both for name, (loads, stores) in found.items() if (both := loads & stores)} == ALLOWED


def test_a_kernel_that_does_is_found():
    racing = (
        (Path(__file__).parents[2] / "tests_gpu" / "racing.py").read_text().replace("join_in_place", "_join_kernel")
    )
    loads, stores = kernels_of(racing)["_join_kernel"]
    assert loads & stores == {"out", "lse"}


HIDDEN = """
@triton.jit
def _{name}_kernel(x, out):
    same = x
    {body}
"""


@pytest.mark.parametrize(
    "body",
    ["tl.store(same + 1, tl.load(x))", "tl.atomic_add(x + 1, tl.load(out))", "tl.store(pointer=x, value=tl.load(x))"],
)
def test_other_ways_to_write_one_are_found(body):
    ((loads, stores),) = kernels_of(HIDDEN.format(name="any", body=body)).values()
    assert loads & stores == {"x"}
