# Build: compilers are needed for llama.cpp and our reader, and only here.
FROM python:3.11-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# llama.cpp first: this layer is kept as long as its version is. GGML_NATIVE off (AVX2 and FMA are
# then enough on x86): the image may run on another machine than the one that built it.
RUN python -m venv /opt/headrace \
 && CMAKE_ARGS=-DGGML_NATIVE=OFF /opt/headrace/bin/pip install --no-cache-dir llama-cpp-python==0.3.36
COPY . .
RUN /opt/headrace/bin/pip install --no-cache-dir ./

# Run: the interpreter, the environment, the OpenMP library, and nobody's rights.
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
 && useradd --system --create-home --uid 10001 headrace \
 && install -d -o headrace /home/headrace/.cache
COPY --from=build /opt/headrace /opt/headrace
USER headrace
ENV PATH=/opt/headrace/bin:$PATH OLLAMA_HOST=0.0.0.0:8080
# What was measured and learnt is in the second: name it to keep it from one container to the next.
VOLUME /models /home/headrace/.cache
EXPOSE 8080
HEALTHCHECK --interval=30s --timeout=5s --start-period=5m \
  CMD ["python", "-c", "import httpx; httpx.get('http://127.0.0.1:8080/api/version').raise_for_status()"]
ENTRYPOINT ["serve"]
CMD ["/models/model.gguf"]
