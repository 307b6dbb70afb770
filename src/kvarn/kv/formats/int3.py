from kvarn.kv.formats.base import Affine

FORMAT = Affine("int3", bits=3)
