"""Rotated by a Hadamard transform, then the nearest of 16 centroids of a Gaussian; one scale a token and head.

QuaRot (Ashkboos et al. 2024, arXiv 2404.00456) rotates; TurboQuant (Zandieh et al. 2025, arXiv 2504.19874) adds the
codebook, after Lloyd and Max.
"""

from kvarn.kv.formats.base import TokenScaled

FORMAT = TokenScaled("turbo4", bits=4)
