"""The text of `opintercept diff --ranks`: which rank diverged first, and what followed. Must not import torch."""

from __future__ import annotations

from opintercept._core.text import counted, printable
from opintercept._ranks.expectations import named_ranks, who_diverged
from opintercept.cli.diff.words import WIDTH, module_text, short_op
from opintercept.cli.terminal.output import fitted, listed, named_run
from opintercept.cli.terminal.style import styled
from opintercept.runs.ranks.difference import RankDifference, RankFinding
from opintercept.runs.store.run import Run

_MOST_GROUPS = 4  # of ranks that are shown


def ranks_text(found: RankDifference, run: Run) -> list[str]:
    """The result as lines."""
    first, last = found.steps
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    lines = [
        named_run(run),
        "",
        f"{counted(len(found.ranks), 'rank')}, {counted(found.calls, 'call')} in {steps}",
        *_shared_weights(found),
    ]
    if not found.outliers:
        lines.append("statistics were not compared: two ranks have no majority that says which of them is the outlier")
    if found.missing:
        lines.append(f"{named_ranks(found.missing)} {'has' if len(found.missing) == 1 else 'have'} no calls")
    if found.unfinished:
        where = listed([f"rank {rank} in step {step}" for rank, step in found.unfinished.items()], 8)
        lines.append(f"not finished, as after a kill: {where}; what follows there was not counted")
    if found.first is None:
        return [*lines, styled("nothing diverged", "right")]
    lines += ["", *_first_diverged(found.first)]
    if found.found > 1:
        lines += ["", f"{counted(found.found, 'finding')}, of which the later ones may come from the first:"]
        lines.append(_divergences(found))
        if found.found > len(found.findings):
            lines.append(f"... and {found.found - len(found.findings):,} more; a larger --limit shows them")
    return lines


def _shared_weights(found: RankDifference) -> list[str]:
    lines = []
    for groups, number in found.shared[:_MOST_GROUPS]:
        shown = " and on ".join(named_ranks(group) for group in groups[:_MOST_GROUPS])
        more = "" if len(groups) <= _MOST_GROUPS else f" and {len(groups) - _MOST_GROUPS} more groups"
        lines.append(f"{counted(number, 'weight')} should be equal on {shown}{more}")
    if len(found.shared) > _MOST_GROUPS:
        lines.append(f"... and weights on {len(found.shared) - _MOST_GROUPS:,} other groups of ranks")
    if not found.shared:
        lines.append("no weight is equal on several ranks when it first appears, so none is compared")
    return lines


def _first_diverged(first: RankFinding) -> list[str]:
    lines = [styled(f"first: {_diverged(first)}", "wrong")]
    call = f"call {first.index} of rank {first.rank}"
    lines.append(f"  {call}, {first.phase}: {short_op(first.op)} in {module_text(first.module)}")
    if first.source is not None:
        lines.append(f"  at {printable(first.source, WIDTH)}")
    if not first.majority:
        lines.append("  no majority of ranks agrees, which would say which of them are wrong")
    return lines


def _diverged(finding: RankFinding) -> str:
    step = f"at step {finding.step}"
    diverged = who_diverged(finding.parts)
    if finding.what in ("weight", "operand"):
        named = f"the weight {finding.operand}" if finding.what == "weight" else f"the operand {finding.operand}"
        return f"{diverged} {step}, in {named}"
    if finding.what == "calls":
        made = [
            f"{named_ranks(part)} {'makes' if len(part) == 1 else 'make'} {counted(int(number), 'call')}"
            for part, number in zip(finding.parts, finding.numbers, strict=True)
        ]
        return f"{' and '.join(made)} {step}"
    if finding.what == "order":
        return f"{diverged} {step}: the same calls in another order, from this one on"
    who = named_ranks(finding.parts[-1])
    if finding.what == "not finite":
        has = "has" if len(finding.parts[-1]) == 1 else "have"
        return f"{who} {has} NaN or Inf {step} where {named_ranks(finding.parts[0])} {has.replace('has', 'have')} none"
    usual, value = finding.numbers
    figure = "root mean square" if finding.statistic == "rms" else "largest magnitude"
    return f"{who} is an outlier {step}: the output's {figure} is {value:.3g}, and {usual:.3g} on the median rank"


def _divergences(found: RankDifference) -> str:
    rows = [
        (
            module_text(finding.module),
            finding.phase,
            short_op(finding.op),
            finding.operand or "-",
            finding.what,
            str(finding.step),
            named_ranks(finding.odd).partition(" ")[2],
            str(finding.times),
        )
        for finding in found.findings
    ]
    head = ("module", "pass", "operator", "operand", "what", "step", "ranks", "times")
    return fitted([head, *rows], left=5, last=("module",), spare=("operator",))
