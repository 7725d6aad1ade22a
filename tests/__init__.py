"""What any module of tests may use."""

from typing import Any

import pytest


def cases(names: str, *rows: Any, **options: Any) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` where each row of the table is an argument."""
    return pytest.mark.parametrize(names, rows, **options)
