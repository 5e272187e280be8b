"""Compares what kernels stand for, whatever the nodes are called and however much of the graph is at hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_SUMS = {"aten.sum.dim_IntList": "aten.mean.dim", "aten.sum.default": "aten.mean.default"}


def outputs_of(plain: Mapping[str, Any]) -> dict[str, Any]:
    """What each output of a kernel is, as terms in its arguments, by place; `plain` is from `Fragment.as_plain`."""
    terms = {held[0]: f"argument {place}" for place, held in plain["given"].items()}
    nodes = {each[0]: each for each in plain["nodes"]}
    numbers: dict[str, int] = {}

    def term(name: str) -> str:
        if name not in terms:
            node = _as_average(nodes[name], nodes)
            written = json.dumps([node[1], inner(node[2]), inner(node[3]), node[4]])
            terms[name] = f"term {numbers.setdefault(written, len(numbers))}"
        return terms[name]

    def inner(value: Any) -> Any:
        if isinstance(value, dict):
            return {"node": term(value["node"])} if [*value] == ["node"] else {k: inner(v) for k, v in value.items()}
        return [*map(inner, value)] if isinstance(value, list) else value

    found = {place: [term(held[0]), *held[1:]] for place, held in plain["made"].items()}
    meaning = {f"term {number}": written for written, number in numbers.items()}
    return {place: [_whole(held[0], meaning), *held[1:]] for place, held in found.items()}


def _whole(term: str, meaning: Mapping[str, str]) -> list[str]:
    """A term with all that it is made of, in an order that does not depend on how they are numbered."""
    order, open_ = [], [term]
    while open_:
        each = open_.pop()
        if each in meaning and each not in order:
            order.append(each)
            open_ += [part["node"] for part in _parts(json.loads(meaning[each]))]
    names = {each: f"term of {number}" for number, each in enumerate(order)}
    texts = []
    for each in order:
        text = meaning[each]
        for part in {part["node"] for part in _parts(json.loads(text))}:
            text = text.replace(f'"{part}"', f'"{names.get(part, part)}"')
        texts.append(text)
    return texts or [term]


def _parts(value: Any) -> list[dict[str, str]]:
    if isinstance(value, dict) and [*value] == ["node"]:
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [part for each in inner for part in _parts(each)]


def _as_average(node: list[Any], nodes: Mapping[str, list[Any]]) -> list[Any]:
    """The mean or the variance that a node divides a sum for, see `provenance`; else the node."""
    total = nodes.get(node[2][0]["node"]) if node[1] == "aten.div.Tensor" and isinstance(node[2][0], dict) else None
    if total is None or not total[0].startswith("buf"):
        return node
    if total[1] in _SUMS:
        return [node[0], _SUMS[total[1]], *total[2:]]
    return nodes[total[2][0]["node"]]
