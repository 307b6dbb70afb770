from kvarn.kv.formats.base import Affine

FORMAT = Affine("int4", bits=4)
