"""Runs GGUF models: files, hardware, llama.cpp, scheduling, sampling, templates; knows no HTTP."""
