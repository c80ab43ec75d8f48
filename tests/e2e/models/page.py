"""docs/models.md, which is the matrix's table: `python -m e2e.models.page` in tests writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from e2e.models import families  # noqa: F401, as it fills the table
from e2e.models.table import ARCHITECTURES, Architecture

PAGE = Path(__file__).parents[3] / "docs/models.md"
BEGIN = """# Models

These architectures share embeddings: with vLLM 0.32.0 on a CPU and tiny checkpoints, answers were
those of an engine without ecd, and the consumer's encoder never ran
([tests](testing.md#the-suites)).

*By metadata*: media that a proxy may leave out of the consumer's request
([when](vllm-reference.md#metadata-in-answers)). Others travel to the consumer, which does not
encode them, and preprocesses them unless its [middleware](vllm-middleware.md#outlines) has found
them *by outline*.

Videos and audio, alone and beside other media, were also asked for twice in chats, at vLLM's
server with the middleware. The answers were those of the server without ecd, and the second time
the encoder never ran. *In chats*: media that were then neither decoded nor preprocessed.

| family | vLLM's classes | media | by metadata | by outline | in chats | remarks |
| --- | --- | --- | --- | --- | --- | --- |
"""
NOT_RUN = """
## Not run

These did not run on a CPU, and may work on a GPU:
{}.

Whisper shares nothing, and says so.
"""
UNTRIED = (
    # `Invalid type of HuggingFace processor`: it is code of a repository, and no test downloads any
    *("Keye", "Kimi-VL", "MiniCPM-V before 4.6", "Molmo", "Phi-3.5", "Phi-4"),
    "Nemotron Nano VL",  # needs kernels of Mamba-2
)


def remarks(each: Architecture) -> str:
    """What a reader has to know besides."""
    said = [each.remark] if each.remark else []
    if each.pools:
        said.append("as a pooling model")
    if each.encoder != "ec_producer":
        said.append("encode with `ec_both`: vLLM has no `ec_producer` for it")
    if each.engine.get("model_impl"):
        said.append(f"with `--model-impl {each.engine['model_impl']}`")
    if each.tolerance > Architecture.tolerance:
        said.append("items encoded together change each other slightly, as in vLLM itself")
    said += [f"{count} {medium} a prompt" for medium, count in each.most.items()]
    said += [f"*{row}*: {error}" for row, error in each.without.items()]
    return "; ".join(said)


def lines() -> Iterator[str]:
    tried = sorted(ARCHITECTURES.values(), key=lambda each: (each.family, each.kind, each.name))
    yield BEGIN
    alike: dict[tuple[str, ...], list[str]] = {}
    for each in tried:
        if not each.fails:
            media = ", ".join(each.media)
            by_metadata = ", ".join(each.by_metadata.split()) or "none"
            by_outline = ", ".join(each.by_outline.split()) or "none"
            in_chats = ", ".join(each.by_middleware()) or ("none" if each.chats() else "")
            row = each.family, media, by_metadata, by_outline, in_chats, remarks(each)
            alike.setdefault(row, []).append(f"`{each.kind}`")
    for (family, *of_all), kinds in alike.items():
        yield f"| {' | '.join((family, ', '.join(kinds), *of_all))} |\n".replace("  ", " ")
    failed = (f"`{each.kind}`" for each in tried if each.fails)
    yield NOT_RUN.format(",\n".join((*failed, ", ".join(UNTRIED))))


def page() -> str:
    return "".join(lines())


if __name__ == "__main__":
    PAGE.write_text(page())
