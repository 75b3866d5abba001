"""Other ways to run a vision transformer on fewer tokens, for honest side-by-side runs; each written from its paper.

`pmvit.compress(model, Tome(r=13))` puts one on a copy of a model, as it does a plan.
"""

from pmvit.methods.act import Act
from pmvit.methods.base import METHODS, Method, make_method, method_called
from pmvit.methods.dynamic_vit import DynamicVit
from pmvit.methods.evit import Evit
from pmvit.methods.evo_vit import EvoVit
from pmvit.methods.expedite import Expedite
from pmvit.methods.floors import RandomMerging, TopK
from pmvit.methods.ia_red import IaRed2
from pmvit.methods.ps_vit import PsVit
from pmvit.methods.tofu import Tofu
from pmvit.methods.tome import Tome
from pmvit.methods.tps import Tps
from pmvit.methods.uniform import Uniform
from pmvit.methods.zero_tprune import ZeroTPrune

__all__ = [
    "METHODS",
    "Act",
    "DynamicVit",
    "Evit",
    "EvoVit",
    "Expedite",
    "IaRed2",
    "Method",
    "PsVit",
    "RandomMerging",
    "Tofu",
    "Tome",
    "TopK",
    "Tps",
    "Uniform",
    "ZeroTPrune",
    "make_method",
    "method_called",
]
