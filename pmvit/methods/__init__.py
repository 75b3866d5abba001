"""Other ways to run a vision transformer on fewer tokens, for honest side-by-side runs; each written from its paper.

`pmvit.compress(model, Tome(r=13))` puts one on a copy of a model, as it does a plan.
"""

from pmvit.methods.act import Act as Act
from pmvit.methods.base import METHODS as METHODS
from pmvit.methods.base import Method as Method
from pmvit.methods.base import make_method as make_method
from pmvit.methods.base import method_called as method_called
from pmvit.methods.diffrate import DiffRate as DiffRate
from pmvit.methods.evo_vit import EvoVit as EvoVit
from pmvit.methods.expedite import Expedite as Expedite
from pmvit.methods.floors import RandomMerging as RandomMerging
from pmvit.methods.floors import Uniform as Uniform
from pmvit.methods.halfway import Evit as Evit
from pmvit.methods.halfway import TopK as TopK
from pmvit.methods.halfway import Tps as Tps
from pmvit.methods.halfway import ZeroTPrune as ZeroTPrune
from pmvit.methods.learned import DynamicVit as DynamicVit
from pmvit.methods.learned import IaRed2 as IaRed2
from pmvit.methods.mctf import Mctf as Mctf
from pmvit.methods.ps_vit import PsVit as PsVit
from pmvit.methods.tome import Pitome as Pitome
from pmvit.methods.tome import Tofu as Tofu
from pmvit.methods.tome import Tome as Tome
