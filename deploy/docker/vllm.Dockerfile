# vLLM's image with ecd's client, which adds no package that vLLM lacks. From the repository:
#   docker build -f deploy/docker/vllm.Dockerfile -t REGISTRY/vllm-with-ecd:0.32.0 .
ARG VLLM=v0.32.0
FROM vllm/vllm-openai:${VLLM}
COPY . /src
RUN pip install --no-cache-dir /src && rm -r /src
