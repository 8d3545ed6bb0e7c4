"""Runs GGUF models: files, hardware, llama.cpp, scheduling, sampling, chat templates; knows no HTTP."""
