"""How the hooks print a table. Imports nothing."""

from __future__ import annotations


def align(table: list[list[str]], *, texts: int) -> str:
    """Columns as wide as they need, the first `texts` set to the left, the others, numbers, to the right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )
