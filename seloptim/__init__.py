"""Adam in curved weight space (SymExpLin, arXiv:2607.09967), as a drop-in torch optimizer."""

from ._options import PAPER_SCALE_LR as PAPER_SCALE_LR
from .curved import Curved as Curved
from .groups import param_groups as param_groups
from .losses import FusedLinearCrossEntropy as FusedLinearCrossEntropy
from .losses import cross_entropy as cross_entropy
from .losses import linear_cross_entropy as linear_cross_entropy
from .optimizer import SELAdam as SELAdam
from .optimizer import SELAdamW as SELAdamW
