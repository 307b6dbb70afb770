from kvarn.kv.formats.base import TokenScaled

# Rotated by a Hadamard transform, then the nearest of 8 centroids of a Gaussian (QuaRot, TurboQuant).
FORMAT = TokenScaled("turbo3", bits=3)
