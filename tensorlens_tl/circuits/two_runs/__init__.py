"""What makes two runs differ, and how the difference acts: exact sums over the difference of two passes.

| module | question |
| --- | --- |
| `target` | which number's change is explained? |
| `models`, `weights` | which changed weights of a fine-tuned model change it? |
| `layer_routes` | does the change pass a layer by values, by where heads attend, by the MLP or by norm scales? |
"""

from tensorlens_tl.circuits.two_runs.layer_routes import routes
from tensorlens_tl.circuits.two_runs.models import compare_models

__all__ = ["compare_models", "routes"]
