"""A data frame that prints in full, with three digits per number, split into blocks where a line is too short.

A module of its own, because importing pandas takes a while.
"""

from shutil import get_terminal_size

import pandas as pd


class PrintedFrame(pd.DataFrame):
    """A data frame that prints in full; anything computed from it is an ordinary data frame."""

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame

    def __repr__(self) -> str:
        number = "{:.3g}".format
        width = get_terminal_size().columns
        with pd.option_context("display.max_columns", None, "display.width", width, "display.float_format", number):
            return super().__repr__()
