"""How much each token of each layer matters: Eq. 9 through the value tensor, and the scorers of the ablation.

The score of key token k is the sum over queries q, averaged over heads, of `A[q, k] * dL/dA[q, k]`. With `O = A V` and
G the gradient of O, `dL/dA = G V^T`, so that sum is exactly `<V_k, dL/dV_k>`: Eq. 9 needs the values and their
gradient and never the attention map. Fused attention stays on and no N x N tensor exists. The parameters want no
gradient while scoring, which makes a scoring step cheaper than a training step.
"""

from pmvit.scoring.run import score
from pmvit.scoring.scores import ScoreConfig, Scores

__all__ = ["ScoreConfig", "Scores", "score"]
