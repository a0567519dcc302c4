"""Models built from programs: the weights are constructed by hand, so that the truth about every answer is known.

| program | what it says next | how |
| --- | --- | --- |
| `previous-token` | the token before | L0H0 |
| `two-back` | the token two before | L0H0 copies one back, L1H0 copies that one back |
| `reverse` | letters from the last to the first | L0H0 finds the separator, MLP0 computes where to look, L1H0 copies |
| `sort` | letters in the order of the alphabet | L0H0 attends to the next letter |
| `induction` | what followed last time | L0H0 notes what came before, L1H0 matches and copies |
| `two-hop` | the partner of the question's partner | L0H0 notes partners, L1H0 and L2H0 look up |
| `counting` | how many of a letter there are | L0H0 attends to them, a little to each |

`program` gives one by name. Each comes without norms and with LayerNorms, as a HookedTransformer (TransformerLens 3.9)
and as a TransformerBridge (3.9 and 4), and states its truth: the source tokens of every answer, the components that
write and move it with the edges between them, and what chose where each head attends. No token is drawn from a text,
and no weight is trained; all are ours.

    >>> sorting = program("sort")
    >>> prompt = sorting.prompts(1)[0]
    >>> " ".join(sorting.words(prompt))
    '<|bos|> m y a i q | a i m q'
    >>> truth = sorting.truth(prompt)
    >>> sorting.words([truth.answer]), sorted(truth.sources)
    (['y'], [2])
"""

from functools import cache
from typing import Any

from tensorlens_tl._arguments import check_choice
from tensorlens_tl.demo.programs.definition import Program, Truth, Why
from tensorlens_tl.demo.programs.looking_up import counting, induction, two_hop
from tensorlens_tl.demo.programs.moving import previous_token, reverse, sort, two_back

__all__ = ["PROGRAMS", "Program", "Truth", "Why", "program"]

_BUILDERS = {
    "previous-token": previous_token,
    "two-back": two_back,
    "reverse": reverse,
    "sort": sort,
    "induction": induction,
    "two-hop": two_hop,
    "counting": counting,
}

PROGRAMS = tuple(_BUILDERS)
"""The names of the programs."""


def program(name: Any) -> Program:
    """A program by its name.

    Args:
        name: one of `PROGRAMS`.

    Raises:
        InvalidInputError: no program of that name.

    >>> program = tlens.demo.program("induction")
    >>> program.model().cfg.n_layers
    2
    """
    check_choice("program", name, PROGRAMS)
    return _program(name)


@cache
def _program(name: str) -> Program:
    return _BUILDERS[name]()
