"""Direct reads of model files, and weights streamed by them into llama.cpp's graphs.

In: paths and places in the files. Out: bytes in the caller's buffers, or where an operation of the
graph reads them when it runs. Knows neither models nor who asked. Written in C; see direct.h,
readers.h and stream.h.
"""

from headrace.native._streamer import Reader, ReaderStats, Stream, StreamStats

__all__ = ["Reader", "ReaderStats", "Stream", "StreamStats"]
