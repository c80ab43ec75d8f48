"""docs/models.md, which is the matrix's table: `python -m e2e.models.page` in tests writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from e2e.models import families  # noqa: F401, as it fills the table
from e2e.models.table import ARCHITECTURES, Architecture

PAGE = Path(__file__).parents[3] / "docs/models.md"
BEGIN = """# Models

These architectures share embeddings. Tiny checkpoints with random weights were run with vLLM 0.32.0
on a CPU, as `ec_producer`, `ec_consumer` and `ec_both`: one item, several, repeated and reordered
items, mixed media, videos at 1, 2 and 8 frames a second, and short and long sounds. Tokens and
log-probabilities were those of an engine without ecd, and the consumer's encoder never ran.
[The tests](testing.md#the-suites) write this page, and run every night.

*By metadata*: media that a proxy may leave out of the consumer's request
([when](vllm-reference.md#metadata-in-answers)). Others travel to the consumer, which preprocesses
them, but does not encode them.

| family | vLLM's class | media | by metadata | remarks |
| --- | --- | --- | --- | --- |
"""
NOT_RUN = """
## Not run

vLLM 0.32.0 could not run these on a CPU. They may work on a GPU.

| architecture | why |
| --- | --- |
"""
UNTRIED = {
    "Keye, Kimi-VL, MiniCPM-V before 4.6, Molmo, Phi-3.5, Phi-4": "`Invalid type of HuggingFace "
    "processor`: theirs is code of their repositories, and no test downloads any",
    "Nemotron Nano VL": "needs kernels of Mamba-2",
    "Whisper": "shares nothing, and says so; on a CPU vLLM's log-probabilities are no numbers",
}


def remarks(each: Architecture) -> str:
    """What a reader has to know besides."""
    said = [each.remark] if each.remark else []
    if each.pools:
        said.append("as a pooling model")
    if each.encoder != "ec_producer":
        said.append("encoded by an `ec_both`: vLLM has no `ec_producer` for it")
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
    for each in tried:
        if not each.fails:
            media = ", ".join(each.media)
            by_metadata = ", ".join(each.by_metadata.split()) or "none"
            row = each.family, f"`{each.kind}`", media, by_metadata, remarks(each)
            yield f"| {' | '.join(row)} |\n".replace("  ", " ")
    yield NOT_RUN
    for each in tried:
        if each.fails:
            yield f"| `{each.kind}` | {each.fails[1]} |\n"
    for name, why in UNTRIED.items():
        yield f"| {name} | {why} |\n"


def page() -> str:
    return "".join(lines())


if __name__ == "__main__":
    PAGE.write_text(page())
