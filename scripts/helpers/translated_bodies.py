"""What a body must be that LiteLLM makes a chat of: one of the Responses API, or of Google's.

LiteLLM reads such bodies without checking them. Of a wrong type it gives the words of Python, and
what it does not know it leaves out, so that the model would answer less than was sent. So
litellm_gate.py checks each body with these shapes first. A shape is

    a kind           a type of JSON, by its name in a sentence: TEXT, NUMBER ...
    (shape, shape)   either; the first whose type of JSON fits
    [shape]          a list of these
    {name: shape}    an object. Of other names nothing is asked; null is as good as nothing

and a name that ends in ! is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final
from urllib.parse import quote

type Shape = str | tuple[Shape, ...] | list[Shape] | dict[str, Shape]

TEXT: Final = "a string"
NUMBER: Final = "a number"
WHOLE: Final = "a whole number"
SWITCH: Final = "true or false"
OBJECT: Final = "an object"
LIST: Final = "a list"

PART: Final[Shape] = {"type!": TEXT, "text": TEXT, "image_url": (TEXT, OBJECT)}
CONTENT: Final[Shape] = (TEXT, [PART])
ITEMS: Final[Mapping[str, Shape]] = {  # by their type
    "message": {"role": TEXT, "content!": CONTENT},
    "function_call": {"call_id!": TEXT, "name!": TEXT, "arguments": TEXT},
    "function_call_output": {"call_id!": TEXT, "output!": CONTENT},
    "reasoning": {"summary": [OBJECT], "content": [OBJECT]},
}
OTHER_ITEM: Final[Shape] = {"type!": TEXT}
RESPONSE_TOOL: Final[Shape] = {
    "type!": TEXT,
    "name": TEXT,
    "description": TEXT,
    "parameters": OBJECT,
    "strict": SWITCH,
}
RESPONSE: Final[Shape] = {
    "model": TEXT,
    "input!": (TEXT, [OBJECT]),
    "instructions": TEXT,
    "tools": [RESPONSE_TOOL],
    "tool_choice": (TEXT, {"type!": TEXT}),
    "parallel_tool_calls": SWITCH,
    "max_output_tokens": WHOLE,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "stream": SWITCH,
    "store": SWITCH,
    "background": SWITCH,
    "reasoning": {"effort": TEXT, "summary": TEXT},
    "text": {"format": {"type!": TEXT, "schema": OBJECT}, "verbosity": TEXT},
    "metadata": OBJECT,
    "include": [TEXT],
    "truncation": TEXT,
    "user": TEXT,
    "service_tier": TEXT,
}

GOOGLE_PART: Final[dict[str, Shape]] = {
    "text": TEXT,
    "functionCall": {"name!": TEXT, "args": OBJECT},
    "functionResponse": {"name!": TEXT, "response": OBJECT},
    "inlineData": {"data!": TEXT, "mimeType": TEXT},
}
# What is read of a part, by role.
GOOGLE_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("text", "functionCall"),
    "user": ("text", "functionResponse", "inlineData"),
    "system": ("text",),
}
GOOGLE_ROLES: Final = {  # as clients write them, and as LiteLLM reads them
    "user": "user",
    "model": "model",
    "tool": "user",
    "function": "user",
}
SPEECH: Final[Shape] = {"role": TEXT, "parts!": [GOOGLE_PART]}
FUNCTION: Final[Shape] = {
    "name!": TEXT,
    "description": TEXT,
    "parameters": OBJECT,
    "parametersJsonSchema": OBJECT,
}
GOOGLE: Final[Shape] = {
    "contents!": [SPEECH],
    "systemInstruction": SPEECH,
    "tools": [{"functionDeclarations": [FUNCTION]}],
    "toolConfig": {"functionCallingConfig": {"mode": TEXT}},
    "safetySettings": [OBJECT],
    "generationConfig": {
        "temperature": NUMBER,
        "topP": NUMBER,
        "topK": NUMBER,
        "maxOutputTokens": WHOLE,
        "candidateCount": WHOLE,
        "stopSequences": [TEXT],
        "responseMimeType": TEXT,
        "responseSchema": OBJECT,
        "thinkingConfig": OBJECT,
    },
}

# Fields of the chat that LiteLLM makes, and where they come from.
RESPONSE_NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
GOOGLE_NAMES: Final = {
    "messages": "contents",
    "max_tokens": "generationConfig.maxOutputTokens",
    "max_completion_tokens": "generationConfig.maxOutputTokens",
    "temperature": "generationConfig.temperature",
    "top_p": "generationConfig.topP",
    "stop": "generationConfig.stopSequences",
    "response_format": "generationConfig.responseSchema",
    "tool_choice": "toolConfig.functionCallingConfig.mode",
}


@dataclass(frozen=True, slots=True)
class Fault(Exception):
    """A field, and what is wrong with it."""

    field: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.field}: {self.sentence}" if self.field else self.sentence


def check_response(body: object) -> None:
    """Raise Fault for a body of the Responses API that LiteLLM would not read whole."""
    check_shape(body, RESPONSE, "")
    assert isinstance(body, dict)
    items = body["input"]
    if items in ("", []):
        raise Fault("input", "should not be empty")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        is_message = item.get("type") is None and "role" in item
        kind = "message" if is_message else str(item.get("type"))
        check_shape(item, ITEMS.get(kind, OTHER_ITEM), f"input[{index}]")

    check_response_tools(body)
    answer_format = (body.get("text") or {}).get("format") or {}
    if answer_format.get("type") == "json_schema" and not answer_format.get("schema"):
        raise Fault("text.format.schema", "is missing")


def check_response_tools(body: Mapping[str, Any]) -> None:
    """Raise Fault for a function without a name, and a call without tools."""
    tools = body.get("tools") or ()
    for index, tool in enumerate(tools):
        if tool["type"] == "function" and not tool.get("name"):
            raise Fault(f"tools[{index}].name", "is missing")
    if body.get("tool_choice") not in (None, "none", "auto") and not tools:
        raise Fault("tool_choice", "a call is demanded, but there are no tools")


def check_shape(value: object, shape: Shape, place: str) -> None:
    """Raise Fault for the first field that has another shape. `place` names the value."""
    kind = kind_of(value)
    choices = shape if isinstance(shape, tuple) else (shape,)
    for choice in choices:
        if kind == kind_of_shape(choice) or (choice == NUMBER and kind == WHOLE):
            check_inside(value, choice, place)
            return
    wanted = " or ".join(kind_of_shape(choice) for choice in choices)
    subject = "should be" if place else "the body should be"
    raise Fault(place, f"{subject} {wanted}, not {kind}")


def check_inside(value: Any, shape: Shape, place: str) -> None:
    """The elements of a list, the fields of an object. Raises Fault."""
    if isinstance(shape, list):
        for index, element in enumerate(value):
            check_shape(element, shape[0], f"{place}[{index}]")
    if isinstance(shape, dict):
        for name, field_shape in shape.items():
            field = name.removesuffix("!")
            field_place = f"{place}.{field}" if place else field
            if value.get(field) is not None:
                check_shape(value[field], field_shape, field_place)
            elif name.endswith("!"):
                raise Fault(field_place, "is missing")


def kind_of(value: object) -> str:
    """The type of a value of JSON, as a sentence names it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return SWITCH
    if isinstance(value, float):
        return NUMBER
    kinds: Mapping[type, str] = {str: TEXT, int: WHOLE, list: LIST, dict: OBJECT}
    return kinds[type(value)]


def kind_of_shape(shape: Shape) -> str:
    """The type of JSON that fits it."""
    if isinstance(shape, str):
        return shape
    return LIST if isinstance(shape, list) else OBJECT


def mend_google(body: object) -> dict[str, Any]:
    """A body of Google's API as LiteLLM reads all of it. Raises Fault.

    It knows two roles, names in camel case but for images, which it knows by
    `inline_data` alone, and of a system message the first part.
    """
    mended = rename_fields(body, GOOGLE)
    check_shape(mended, GOOGLE, "")
    assert isinstance(mended, dict)
    if not mended["contents"]:
        raise Fault("contents", "should not be empty")
    for index, content in enumerate(mended["contents"]):
        place = f"contents[{index}]"
        role = GOOGLE_ROLES.get(content.get("role", "user"))
        if role is None:
            raise Fault(f"{place}.role", "should be user or model")
        mend_parts(content["parts"], role, place)
        if "role" in content:
            content["role"] = role

    system_parts = mended.get("systemInstruction", {}).get("parts", [])
    mend_parts(system_parts, "system", "systemInstruction")
    if len(system_parts) > 1:
        text = "\n\n".join(part["text"] for part in system_parts)
        mended["systemInstruction"] = {"parts": [{"text": text}]}

    if mended.get("generationConfig", {}).get("candidateCount", 1) != 1:
        raise Fault("generationConfig.candidateCount", "only one answer is written")
    calling = mended.get("toolConfig", {}).get("functionCallingConfig", {})
    if calling.get("mode") == "ANY" and not mended.get("tools"):
        place = "toolConfig.functionCallingConfig.mode"
        raise Fault(place, "a call is demanded, but there are no tools")
    return mended


def mend_parts(parts: list[dict[str, Any]], role: str, place: str) -> None:
    """Write images as LiteLLM reads them. Raises Fault for what it would leave out."""
    read_names = GOOGLE_PARTS[role]
    for index, part in enumerate(parts):
        names = [name for name in GOOGLE_PART if name in part]
        if len(names) > 1:
            fault = f"has {names[0]} and {names[1]}: they are two parts"
            raise Fault(f"{place}.parts[{index}]", fault)
        if not names or names[0] not in read_names:
            fault = f"should have {' or '.join(read_names)}: nothing else is read here"
            raise Fault(f"{place}.parts[{index}]", fault)
        image = part.pop("inlineData", None)
        if image:
            kind = image.get("mimeType", "image/jpeg")
            part["inline_data"] = {"mime_type": kind, "data": image["data"]}


def rename_fields(value: object, shape: Shape) -> object:
    """A copy with the names of the shape, also where the value has them in snake case.

    Google takes both. A name of the shape that is null is left out: LiteLLM would read it.
    What the shape does not know is the same. Raises Fault if a name is there in both ways.
    """
    if isinstance(shape, list) and isinstance(value, list):
        return [rename_fields(element, shape[0]) for element in value]
    if not (isinstance(shape, dict) and isinstance(value, dict)):
        return value

    shapes = {name.removesuffix("!"): field for name, field in shape.items()}
    names = {to_snake_case(name): name for name in shapes}
    sent_fields: dict[str, object] = value
    fields: dict[str, object] = {}
    for sent_name, field in sent_fields.items():
        name = names.get(sent_name, sent_name)
        if name in shapes and field is None:
            continue
        if name in fields:
            raise Fault(name, "is there twice, in camel case and in snake case")
        fields[name] = rename_fields(field, shapes.get(name, OBJECT))
    return fields


def plain_name(name: str) -> str:
    """The name of a model as LiteLLM may write it into a header of its answer.

    `模型` and `a\\nb` are percent-encoded: it would fail after the reply was computed.
    """
    is_plain = name.isascii() and name.isprintable() and name == name.strip()
    return name if is_plain else quote(name, errors="replace")


@cache
def to_snake_case(name: str) -> str:
    """The name as Python would have it: top_p for topP."""
    return re.sub("[A-Z]", lambda capital: f"_{capital[0].lower()}", name)
