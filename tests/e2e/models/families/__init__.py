"""The architectures by family. To import this fills the table."""

from e2e.models.families import deepseek, gemma, glm, internvl, llava, qwen, sound

__all__ = ["deepseek", "gemma", "glm", "internvl", "llava", "qwen", "sound"]
