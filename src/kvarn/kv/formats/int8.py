from kvarn.kv.formats.base import TokenScaled

FORMAT = TokenScaled("int8", bits=8, rewritable=True)
