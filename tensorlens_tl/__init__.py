"""tensorlens_tl: frozen passes, exact operators and attribution methods for TransformerLens.

>>> import tensorlens_tl as tlens
>>> model = tlens.load_demo_model()
>>> attribution = tlens.attribute(model, "Return the value. Return the", collapse="in_out")
>>> bool(attribution.gap.max() < 1e-4)
True

``__init__.pyi`` lists the public names and where they come from. Names are imported on first use, so that the command
line can print its help without waiting for torch.
"""

import ast
import difflib
import importlib
import re
import warnings
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

_HOMES = {
    name.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module
    for name in node.names
}
"""The module that defines each public name; the package itself for its own modules."""

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


_RENAMED = {"RULES": "FROZEN_RULES"}
"""Old names, to be removed in version 0.3."""


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        message = f"tensorlens_tl.{name} is tensorlens_tl.{_RENAMED[name]} now; the old name goes in version 0.3."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return __getattr__(_RENAMED[name])
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_pointer(name)}")
    home = _HOMES[name]
    if home == __name__:
        member = importlib.import_module(f"{home}.{name}")
    else:
        member = getattr(importlib.import_module(home), name)
    globals()[name] = member
    return member


def _pointer(name: str) -> str:
    """Return the end of an error message that says where a missing name is defined, or suggests a similar one."""
    if name.startswith("_"):  # introspection tools look up many private names
        return ""
    homes = [module for module, home in _HOMES.items() if home == __name__]
    for home in homes:
        file = Path(__file__).with_name(f"{home}.py")
        if not file.is_file():
            file = file.with_suffix("") / "__init__.py"
        text = file.read_text(encoding="utf-8")
        if re.search(rf'^    "{re.escape(name)}",$', text, re.MULTILINE):  # in its __all__
            return f"; it is tensorlens_tl.{home}.{name}"
    near = difflib.get_close_matches(name, __all__, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
