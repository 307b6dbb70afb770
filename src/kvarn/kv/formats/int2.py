from kvarn.kv.formats.base import Affine

FORMAT = Affine("int2", bits=2)
