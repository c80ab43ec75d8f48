"""What users of ecd can see, a line each: a change of it is on purpose, or a fault.

`python -m support.surface`, in `tests/`, writes the list anew. Settings, metrics and commands have
lists of their own that are compared, too: the references in docs/.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

import ecd_client
from ecd.settings.config import Config
from ecd_client.cli import context
from ecd_client.vllm.base import settings
from ecd_proto.v1 import cache_pb2, peer_pb2

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests/unit/surface.txt"
SOURCES = "ecd", "client/ecd_client", "proto/ecd_proto"


def surface() -> list[str]:
    return sorted(
        {*names(), *wire(cache_pb2.DESCRIPTOR), *wire(peer_pb2.DESCRIPTOR), *rest(), *errors()}
    )


def names() -> Iterator[str]:
    """The client library's names, with the parameters of what can be called."""
    for name in ecd_client.__all__:
        found = getattr(ecd_client, name)
        yield f"python {name}{_parameters(found)}"
        own = [each for each in found.__mro__ if each.__module__.startswith("ecd_")]
        for member, value in inspect.getmembers(found):
            if not member.startswith("_") and any(member in vars(each) for each in own):
                yield f"python {name}.{member}{_parameters(value)}"


def _parameters(found: object) -> str:
    try:
        return str(inspect.signature(found)) if callable(found) else ""
    except ValueError:
        return ""


def wire(file: FileDescriptor) -> Iterator[str]:
    described = FileDescriptorProto()
    file.CopyToProto(described)
    for service in described.service:
        for call in service.method:
            yield f"rpc {service.name}.{call.name}({call.input_type}) {call.output_type}"
    for message in described.message_type:
        yield from _message(message, f"{described.package}.{message.name}")
    for enum in described.enum_type:
        yield from (f"enum {enum.name}.{each.name} {each.number}" for each in enum.value)


def _message(message: DescriptorProto, name: str) -> Iterator[str]:
    for field in message.field:
        kind = f"{field.label} {field.type} {field.type_name}".strip()
        yield f"field {name}.{field.name} {field.number} {kind}"
    for enum in message.enum_type:
        yield from (f"enum {name}.{each.name} {each.number}" for each in enum.value)
    for inner in message.nested_type:
        yield from _message(inner, f"{name}.{inner.name}")


def rest() -> Iterator[str]:
    for name in Config.model_fields:
        yield f"setting {name}"
    for name in (*settings.KEYS,):
        yield f"connector setting {name}"
    for name in ("FAILED", "USAGE", "UNREACHABLE"):
        yield f"exit code {name} {getattr(context, name)}"


def errors() -> Iterator[str]:
    """The texts of errors, with {} for what is filled in."""
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    for argument in node.exc.args[:1]:
                        if text := _text(argument):
                            yield f"error {ast.unparse(node.exc.func)}: {text}"


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            each.value if isinstance(each, ast.Constant) else "{}" for each in node.values
        )
    return ""


if __name__ == "__main__":
    LIST.write_text("\n".join(surface()) + "\n")
