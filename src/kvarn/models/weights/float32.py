from dataclasses import replace

import torch

from kvarn.models.weights._float import FloatKind

KIND = FloatKind("float32", torch.float32)
FAST = replace(KIND, invariant=False)
