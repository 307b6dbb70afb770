"""The specification of every operation, in torch, on any device. Slow and obvious."""

from kvarn.kernels.reference.backend import ReferenceBackend

BACKEND = ReferenceBackend
