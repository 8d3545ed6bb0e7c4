"""Speaks the Ollama protocol over HTTP; knows neither llama.cpp nor C."""
