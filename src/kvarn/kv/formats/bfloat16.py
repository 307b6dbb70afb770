from kvarn.core.formats import FloatFormat

FORMAT = FloatFormat("bfloat16")
