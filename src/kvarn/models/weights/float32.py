import torch

from kvarn.models.weights._dense import DenseKind

KIND = DenseKind("float32", torch.float32)
