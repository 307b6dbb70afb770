from kvarn.core.formats import FloatFormat

FORMAT = FloatFormat("float32")
