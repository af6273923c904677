"""Options of an analysis: read from strings or values, refused in plain words."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import pydantic
from pydantic import BaseModel, ConfigDict

from attnlens.activations import nearest
from attnlens.errors import OptionError

#: What to write instead, by the types of pydantic's errors.
_WANTED = {
    "bool_": "true or false",
    "int_": "a whole number",
    "float_": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_pattern_mismatch": "text of the form {pattern}",
    "string_too_short": "text of length {min_length} or more",
    "string_too_long": "text of length {max_length} or less",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "greater_than_equal": "a number of at least {ge}",
    "greater_than": "a number above {gt}",
    "less_than_equal": "a number of at most {le}",
    "less_than": "a number below {lt}",
    "multiple_of": "a multiple of {multiple_of}",
    "too_short": "{min_length} values or more",
    "too_long": "{max_length} values or fewer",
    "list_": "values separated by commas",
    "tuple_": "values separated by commas",
    "set_": "values separated by commas",
    "frozen_": "values separated by commas",
    "dict_": 'a table, as in {{"a": 1}}',
    "none_required": "null",
}

#: Errors of a value that should have been several.
_SEVERAL = ("list_type", "tuple_type", "set_type", "frozen_set_type")


def complaints(errors: Iterable[Any]) -> str:
    """Say in plain words what pydantic found wrong.

    Parameters
    ----------
    errors : iterable of dict
        What ``pydantic.ValidationError.errors()`` lists.
    """
    wanted: dict[str, None] = {}
    said: dict[str, None] = {}
    for error in errors:
        kind = error["type"]
        form = _WANTED.get(kind) or _WANTED.get(kind.partition("_")[0] + "_")
        if kind == "missing":
            said[f"{_place(error)} is missing"] = None
        elif kind == "extra_forbidden":
            said[f"there is no {_place(error)}"] = None
        elif form is None:
            said[error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")] = (
                None
            )
        else:
            wanted[form.format(**error.get("ctx", {}))] = None
    return "; ".join([*said, *(["write " + " or ".join(wanted)] if wanted else [])])


def _place(error: Any) -> str:
    return ".".join(str(part) for part in error["loc"])


class Options(BaseModel):
    """Base of an analysis's options: a pydantic model whose fields carry descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @classmethod
    def read(cls, values: Mapping[str, Any], *, prefix: str = "") -> Options:
        """Build the options from strings or typed values, refusing what does not fit.

        A string is read as JSON where that validates (``8``, ``0.5``, ``true``), then as it is,
        then as a list separated by commas.

        Parameters
        ----------
        values : mapping
            Option name to value.
        prefix : str
            The analysis's name, for error messages.

        Raises
        ------
        OptionError
            For an unknown name (with the nearest right one) or a value that does not fit.
        """
        typed: dict[str, Any] = {}
        for name, value in values.items():
            label = f"{prefix}.{name}" if prefix else name
            known = cls.model_fields.get(name)
            if known is None:
                near = nearest(name, cls.model_fields)
                offered = ", ".join(cls.model_fields) or "none"
                raise OptionError(
                    f"There is no option {label!r}.",
                    hint=(f"Did you mean {near!r}? " if near else "") + f"Options: {offered}.",
                )
            typed[name] = cls._read_one(name, value, label)
        try:
            return cls(**typed)
        except pydantic.ValidationError as error:
            raise OptionError(
                f"The options of {prefix or cls.__name__} do not fit together: "
                f"{complaints(error.errors())}."
            ) from error

    @classmethod
    def _read_one(cls, name: str, value: Any, label: str) -> Any:
        attempts = [value]
        if isinstance(value, str):
            attempts.append(value.split(","))
            with contextlib.suppress(ValueError):
                attempts.insert(0, json.loads(value))
        told: list[Any] = []
        for attempt in attempts:
            wrong = cls._errors_of(name, attempt)
            if not wrong:
                return attempt
            # Of a string that should be several values, its parts are what is wrong.
            if attempt is value or (told and all(e["type"] in _SEVERAL for e in told)):
                told = wrong
        what = cls.model_fields[name].description
        raise OptionError(
            f"{label}={value!r} is not valid: {complaints(told)}.",
            hint=f"{label}: {what}" if what else None,
        )

    @classmethod
    def _errors_of(cls, name: str, value: Any) -> list[Any]:
        """List what is wrong with one field's value, whatever the others hold."""
        try:
            cls(**{name: value})
        except pydantic.ValidationError as error:
            return [e for e in error.errors() if e["loc"][:1] == (name,)]
        return []
