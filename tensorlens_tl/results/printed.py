"""A data frame that prints every column: three digits of each number, and in several parts where a line is too short.

By itself, because pandas takes a while to import.
"""

from shutil import get_terminal_size

import pandas as pd


class PrintedFrame(pd.DataFrame):
    """A data frame, printed in full; what is computed from it is an ordinary one."""

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame

    def __repr__(self) -> str:
        number = "{:.3g}".format
        width = get_terminal_size().columns
        with pd.option_context("display.max_columns", None, "display.width", width, "display.float_format", number):
            return super().__repr__()
