"""The field names of api/cove/v1/*.proto, so that neither the SDK nor the fake server can make up their own.

The real server refuses a request with an unknown field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PROTOS = Path(__file__).parents[3] / "api" / "cove" / "v1"
_MESSAGE = re.compile(r"^message (\w+) \{(?:([^\n]*)\}|\n(.*?)^\})", re.S | re.M)
_FIELD = re.compile(r"(map<\w+, *\w+>|(?:repeated )?[\w.]+) (\w+) = \d+")
_RPC = re.compile(r"rpc (\w+)\((\w+)\) returns \((?:stream )?(\w+)\)")

_messages: dict[str, dict[str, str]] = {}
_methods: dict[str, tuple[str, str]] = {}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


for _path in sorted(_PROTOS.glob("*.proto")):
    _text = re.sub(r"//.*", "", _path.read_text())
    for _service, _body in re.findall(r"service (\w+) \{(.*?)^\}", _text, re.S | re.M):
        for _name, _in, _out in _RPC.findall(_body):
            _methods[f"{_service}/{_name}"] = (_in, _out)
    for _name, _line, _block in _MESSAGE.findall(_text):
        _messages[_name] = {
            _camel(field): kind.removeprefix("repeated ")
            for kind, field in _FIELD.findall(_line or _block)
            if not kind.startswith(("reserved", "option"))
        }


def check_request(method: str, message: Mapping[str, Any]) -> None:
    _check(_methods[method][0], message, method)


def check_answer(method: str, message: Mapping[str, Any]) -> None:
    _check(_methods[method][1], message, method)


def _check(kind: str, value: Any, where: str) -> None:
    fields = _messages.get(kind)
    if fields is None:
        return  # a scalar, a map or a well-known type
    for item in value if isinstance(value, list) else [value]:
        assert isinstance(item, Mapping), f"{where}: {item!r} is no {kind}"
        for name, content in item.items():
            assert name in fields, f"{where}: {kind} has no field {name!r}"
            _check(fields[name], content, f"{where}.{name}")
