import torch

from kvarn.models.weights._dense import DenseKind

KIND = DenseKind("bfloat16", torch.bfloat16)
