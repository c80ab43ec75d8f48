"""docs/models.md, which is the matrix's table: `python -m e2e.models.page` in tests writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from e2e.models import families  # noqa: F401, as it fills the table
from e2e.models.table import ARCHITECTURES, Architecture

PAGE = Path(__file__).parents[3] / "docs/models.md"
BEGIN = """# Models

Tiny random checkpoints of these architectures were run with vLLM 0.32.0 on a CPU: an engine
without ecd, an encoder (`ec_producer`), a consumer (`ec_consumer`), and an engine that is both
(`ec_both`). Each answered prompts with one item, two, one item twice, the items in another order,
media of several kinds, videos at 1, 2 and 8 frames a second, and short and long sounds. The
consumer's tokens and log-probabilities were those of the engine without ecd, and its encoder
never ran.

*By metadata* are the media that a proxy may leave out of the consumer's request, as the encoder's
answer has what their placeholders need ([What is announced](vllm.md#what-is-announced)). The others
travel to the consumer, which preprocesses them and does not encode them.

This page is written from the table of [the tests](testing.md#the-suites), which run every night.

| family | vLLM's class | media | by metadata | remarks |
| --- | --- | --- | --- | --- |
"""
NOT_RUN = """
## Not run

vLLM 0.32.0 could not run these on a CPU. ecd knows nothing of an architecture, so nothing says that
they would not work on a GPU.

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
        said.append("what is encoded beside an item changes it slightly, as in vLLM itself")
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
