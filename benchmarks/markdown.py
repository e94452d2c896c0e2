"""Tables of the documentation's pages."""

from collections.abc import Iterable, Sequence

__all__ = ["table"]


def table(columns: Sequence[object], rows: Iterable[Sequence[object]], left: int | None = None) -> list[str]:
    """The lines of a markdown table. Columns from number `left` on are aligned to the right; none by default.

    >>> table(["job", "ms"], [["mlp", 12]], left=1)
    ['| job | ms |', '| --- | ---: |', '| mlp | 12 |']
    """
    left = len(columns) if left is None else left
    rule = ["---"] * left + ["---:"] * (len(columns) - left)
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in (columns, rule, *rows)]
