"""What a body must be that LiteLLM makes a chat of: one of the Responses API, or of Google's.

LiteLLM reads such bodies without checking them. Of a wrong type it gives the words of Python, and
what it does not know it leaves out, so that the model would answer less than was sent. So
litellm_gate.py checks each body with these shapes first. A shape is

    a type           of JSON: str, float (or int), int, bool, dict, list
    (shape, shape)   either; the first whose type of JSON fits
    [shape]          a list of these
    {name: shape}    an object. Of other names nothing is asked; null is as good as nothing

and a name that ends in ! is needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final
from urllib.parse import quote

from pydantic.alias_generators import to_snake

type Shape = type | tuple[Shape, ...] | list[Shape] | dict[str, Shape]

TYPE_NAMES: Final[Mapping[type, str]] = {  # in a sentence
    str: "a string",
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    NoneType: "null",
}

PART: Final[Shape] = {"type!": str, "text": str, "image_url": (str, dict)}
CONTENT: Final[Shape] = (str, [PART])
ITEMS: Final[Mapping[str, Shape]] = {  # by their type
    "message": {"role": str, "content!": CONTENT},
    "function_call": {"call_id!": str, "name!": str, "arguments": str},
    "function_call_output": {"call_id!": str, "output!": CONTENT},
    "reasoning": {"summary": [dict], "content": [dict]},
}
OTHER_ITEM: Final[Shape] = {"type!": str}
RESPONSE_TOOL: Final[Shape] = {
    "type!": str,
    "name": str,
    "description": str,
    "parameters": dict,
    "strict": bool,
}
RESPONSE: Final[Shape] = {
    "model": str,
    "input!": (str, [dict]),
    "instructions": str,
    "tools": [RESPONSE_TOOL],
    "tool_choice": (str, {"type!": str}),
    "parallel_tool_calls": bool,
    "max_output_tokens": int,
    "temperature": float,
    "top_p": float,
    "stream": bool,
    "store": bool,
    "background": bool,
    "reasoning": {"effort": str, "summary": str},
    "text": {"format": {"type!": str, "schema": dict}, "verbosity": str},
    "metadata": dict,
    "include": [str],
    "truncation": str,
    "user": str,
    "service_tier": str,
}

GOOGLE_PART: Final[dict[str, Shape]] = {
    "text": str,
    "functionCall": {"name!": str, "args": dict},
    "functionResponse": {"name!": str, "response": dict},
    "inlineData": {"data!": str, "mimeType": str},
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
SPEECH: Final[Shape] = {"role": str, "parts!": [GOOGLE_PART]}
FUNCTION: Final[Shape] = {
    "name!": str,
    "description": str,
    "parameters": dict,
    "parametersJsonSchema": dict,
}
GOOGLE: Final[Shape] = {
    "contents!": [SPEECH],
    "systemInstruction": SPEECH,
    "tools": [{"functionDeclarations": [FUNCTION]}],
    "toolConfig": {"functionCallingConfig": {"mode": str}},
    "safetySettings": [dict],
    "generationConfig": {
        "temperature": float,
        "topP": float,
        "topK": float,
        "maxOutputTokens": int,
        "candidateCount": int,
        "stopSequences": [str],
        "responseMimeType": str,
        "responseSchema": dict,
        "thinkingConfig": dict,
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


def check_shape(value: Any, shape: Shape, place: str) -> None:
    """Raise Fault for the first field that has another shape. `place` names the value."""
    choices = shape if isinstance(shape, tuple) else (shape,)
    types = [c if isinstance(c, type) else type(c) for c in choices]
    value_type = float if type(value) is int and float in types else type(value)
    if value_type not in types:
        wanted = " or ".join(TYPE_NAMES[json_type] for json_type in types)
        subject = "should be" if place else "the body should be"
        raise Fault(place, f"{subject} {wanted}, not {TYPE_NAMES[type(value)]}")

    check_inside(value, choices[types.index(value_type)], place)


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
    names = {to_snake(name): name for name in shapes}
    sent_fields: dict[str, object] = value
    fields: dict[str, object] = {}
    for sent_name, field in sent_fields.items():
        name = names.get(sent_name, sent_name)
        if name in shapes and field is None:
            continue
        if name in fields:
            raise Fault(name, "is there twice, in camel case and in snake case")
        fields[name] = rename_fields(field, shapes.get(name, dict))
    return fields


def plain_name(name: str) -> str:
    """The name of a model as LiteLLM may write it into a header of its answer.

    `模型` and `a\\nb` are percent-encoded: it would fail after the reply was computed.
    """
    is_plain = name.isascii() and name.isprintable() and name == name.strip()
    return name if is_plain else quote(name, errors="replace")
