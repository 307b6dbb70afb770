from kvarn.kv.formats.base import TokenScaled

# Rotated by a Hadamard transform, then the nearest of 4 centroids of a Gaussian (QuaRot, TurboQuant).
FORMAT = TokenScaled("turbo2", bits=2)
