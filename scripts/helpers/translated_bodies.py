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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

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

CALL: Final[Shape] = {"name!": TEXT, "args": OBJECT}
RESULT: Final[Shape] = {"name!": TEXT, "response": OBJECT}
IMAGE: Final[Shape] = {"data!": TEXT}
GOOGLE_PARTS: Final[Mapping[str, Mapping[str, Shape]]] = {  # by role, then by name
    "model": {"text": TEXT, "functionCall": CALL},
    "user": {
        "text": TEXT,
        "functionResponse": RESULT,
        "inlineData": IMAGE,
        "inline_data": IMAGE,
    },
    "system": {"text": TEXT},
}
SPEECH: Final[Shape] = {"parts!": [OBJECT]}  # of the user, the model, the system
FUNCTION: Final[Shape] = {"name!": TEXT, "description": TEXT, "parameters": OBJECT}
GOOGLE: Final[Shape] = {
    "contents!": [SPEECH],
    "systemInstruction": SPEECH,
    "system_instruction": SPEECH,
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
        kind = "message" if is_message else item.get("type")
        shape = ITEMS.get(kind, OTHER_ITEM) if isinstance(kind, str) else OTHER_ITEM
        check_shape(item, shape, f"input[{index}]")

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


def check_google(body: object) -> None:
    """Raise Fault for a body of Google's API that LiteLLM would not read whole."""
    check_shape(body, GOOGLE, "")
    assert isinstance(body, dict)
    if not body["contents"]:
        raise Fault("contents", "should not be empty")
    for index, content in enumerate(body["contents"]):
        place = f"contents[{index}]"
        role = content.get("role", "user")
        if role not in ("user", "model"):
            raise Fault(f"{place}.role", "should be user or model")
        check_parts(content["parts"], role, place)
    for name in ("systemInstruction", "system_instruction"):
        parts = (body.get(name) or {}).get("parts", ())
        check_parts(parts, "system", name)

    if (body.get("generationConfig") or {}).get("candidateCount", 1) != 1:
        raise Fault("generationConfig.candidateCount", "only one answer is written")
    calling = (body.get("toolConfig") or {}).get("functionCallingConfig") or {}
    if calling.get("mode") == "ANY" and not body.get("tools"):
        place = "toolConfig.functionCallingConfig.mode"
        raise Fault(place, "a call is demanded, but there are no tools")


def check_parts(parts: list[dict[str, Any]], role: str, place: str) -> None:
    """Raise Fault for a part of Google's that would be left out."""
    shapes = GOOGLE_PARTS[role]
    for index, part in enumerate(parts):
        part_place = f"{place}.parts[{index}]"
        name = next((name for name in shapes if name in part), None)
        if name is None:
            kinds = " or ".join(name for name in shapes if "_" not in name)
            raise Fault(part_place, f"should have {kinds}: nothing else is read here")
        check_shape(part[name], shapes[name], f"{part_place}.{name}")


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


def mend_google(body: dict[str, Any]) -> bool:
    """Write what LiteLLM would leave out as it reads it. Whether there was any.

    It knows images by `inline_data` alone, and of a system message the first part.
    """
    is_mended = False
    for content in body["contents"]:
        for part in content["parts"]:
            image = part.pop("inlineData", None)
            if image:
                kind = image.get("mimeType", "image/jpeg")
                part["inline_data"] = {"mime_type": kind, "data": image["data"]}
                is_mended = True

    for name in ("systemInstruction", "system_instruction"):
        parts = (body.get(name) or {}).get("parts", ())
        if len(parts) > 1:
            text = "\n\n".join(part.get("text", "") for part in parts)
            body[name] = {"parts": [{"text": text}]}
            is_mended = True
    return is_mended
