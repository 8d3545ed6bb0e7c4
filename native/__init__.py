"""Direct reads of model files, many in flight: a path in, its bytes in the caller's buffers out.

Knows neither what the bytes mean nor who asked for them. Written in C; see direct.h and readers.h.
"""

from headrace.native._streamer import Reader, ReaderStats

__all__ = ["Reader", "ReaderStats"]
