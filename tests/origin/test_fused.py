"""Which nodes of a graph each launch of a wrapper computes, from texts of both."""

from __future__ import annotations

from textwrap import dedent

import pytest

from opintercept._origin.fused import InductorGraph, nodes_of
from opintercept._origin.wrappers import Event, Look

LOOKS = {f"buf{number}": Look("torch.float32", (32,)) for number in range(4)}


def graph(body: str) -> InductorGraph:
    """A graph with lines of `net.py`: `3: log = log(arg0_1)`."""
    rows = ['    def forward(self, arg0_1: "f32[4, 8]", arg1_1: "f32[8, 8]"):']
    for row in dedent(body).strip().splitlines():
        if row.startswith("return "):
            rows.append(f"        {row}")
            continue
        line, _, assigned = row.partition(": ")
        name, _, called = assigned.partition(" = ")
        operator, _, arguments = called.partition("(")
        rows.append(f"         # File: net.py:{line} in forward, code: code of line {line}")
        rows.append(f'        {name}: "f32[4, 8]" = torch.ops.aten.{operator}.default({arguments};  arg0_1 = None')
    return InductorGraph("\n".join(rows))


def launch(line: int, read: str, written: str) -> Event:
    return Event("launch", line, f"kernel_{line}", tuple(read.split()), tuple(written.split()), LOOKS)


def product(line: int, read: str, written: str) -> Event:
    return Event("extern", line, "mm", tuple(read.split()), (written,), {})


def computed(text: str, events: list[Event], lines: dict[int, list[int]]) -> dict[int, list[str]]:
    """The names of the nodes of each launch. `lines` are the program's, by those of the wrapper."""
    stacks = [(at, f'  File "net.py", line {line}, in forward') for at, its in lines.items() for line in its]
    return {line: [node.name for node in found] for line, found in nodes_of(graph(text), events, stacks).items()}


@pytest.mark.parametrize("written", ["", "Backward of forward node: ", "ac_graph_id: 0 - must_recompute "])
def test_nodes_have_the_line_above_them(written: str) -> None:
    text = f"""
        # {written}File: model.py:3 in forward, code: y = x.log()
        log: "f32[4][1]cpu" = torch.ops.aten.log.default(x);  x = None
    """
    assert InductorGraph(text).nodes["log"].line == ("model.py", 3, "forward")


def test_a_kernel_computes_what_is_between_its_buffers() -> None:
    text = """
        3: neg = neg(arg0_1)
        3: log = log(neg)
        4: mm = mm(log, arg1_1)
        5: relu = relu(mm)
        5: exp = exp(relu)
        return (exp,)
    """
    events = [launch(10, "arg0_1", "buf0"), product(11, "buf0 arg1_1", "buf1"), launch(12, "buf1", "buf2")]
    assert computed(text, events, {10: [3], 11: [4], 12: [5]}) == {10: ["neg", "log"], 12: ["relu", "exp"]}


def test_what_another_kernel_has_computed_is_not_computed_again() -> None:
    """Both kernels have the first line, and the second one has all that the first node needs."""
    text = """
        3: log = log(arg0_1)
        4: mm = mm(log, arg1_1)
        3: log_1 = log(mm)
        5: add = add(log_1, arg0_1)
        return (add,)
    """
    events = [launch(10, "arg0_1", "buf0"), product(11, "buf0 arg1_1", "buf1"), launch(12, "buf1 arg0_1", "buf2")]
    assert computed(text, events, {10: [3], 11: [4], 12: [3, 5]}) == {10: ["log"], 12: ["log_1", "add"]}


def test_a_product_of_a_call_is_in_no_kernel() -> None:
    text = """
        3: log = log(arg0_1)
        3: mm = mm(log, log)
        3: exp = exp(mm)
        return (exp,)
    """
    events = [launch(10, "arg0_1", "buf0"), product(11, "buf0 buf0", "buf1"), launch(12, "buf1", "buf2")]
    assert computed(text, events, {10: [3], 11: [3], 12: [3]}) == {10: ["log"], 12: ["exp"]}


def test_a_constant_is_left_out_unless_it_is_all_there_is() -> None:
    text = """
        3: full = full([], 1.0)
        4: add = add(arg0_1, full)
        6: full_1 = full([4, 8], 2.0)
        return (add, full_1)
    """
    events = [launch(10, "arg0_1", "buf0"), launch(11, "", "buf1")]
    assert computed(text, events, {10: [4], 11: [6]}) == {10: ["add"], 11: ["full_1"]}


def test_a_kernel_that_lays_operands_out_for_a_call_is_part_of_it() -> None:
    text = """
        3: mm = mm(arg0_1, arg1_1)
        4: relu = relu(mm)
        return (relu,)
    """
    looks = {"buf0": Look("torch.float32", (32,)), "buf1": Look("torch.float32", (64,))}
    copies = Event("launch", 10, "kernel_10", ("arg0_1", "arg1_1"), ("buf0", "buf1"), looks)
    events = [copies, product(11, "buf0 buf1", "buf2"), launch(12, "buf2", "buf3")]
    assert computed(text, events, {11: [3], 12: [4]}) == {10: ["mm"], 12: ["relu"]}
