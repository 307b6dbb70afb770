"""Text to token ids and back, chat templates, and text streams."""

from kvarn.text.load import load_tokenizer
from kvarn.text.stream import TextStream
from kvarn.text.tokenizer import Tokenizer, TokenizerSettings

__all__ = ["TextStream", "Tokenizer", "TokenizerSettings", "load_tokenizer"]
