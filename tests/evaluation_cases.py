"""What the tests of several evaluations share."""

from functools import cache

import tensorlens_tl as tlens

THIRDS = (0.0, 1 / 3, 2 / 3, 1.0)


@cache
def recall_model():
    return tlens.load_demo_model("recall")
