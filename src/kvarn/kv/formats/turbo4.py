from kvarn.kv.formats.base import TokenScaled

# Rotated by a Hadamard transform, then the nearest of 16 centroids of a Gaussian (QuaRot, TurboQuant).
FORMAT = TokenScaled("turbo4", bits=4)
