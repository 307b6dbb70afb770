from dataclasses import replace

import torch

from kvarn.models.weights._float import FloatKind

KIND = FloatKind("bfloat16", torch.bfloat16)
FAST = replace(KIND, invariant=False)
