"""What all option classes share: checks of their values, and the keywords they stand for."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pmvit.errors import PmvitError

Function = TypeVar("Function", bound=Callable[..., Any])


def choices(annotation: Any) -> tuple[str, ...]:
    """The values that a type allows: of a `Literal`, alone or in a union; none if it is of another kind."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return tuple(value for part in parts for value in choices(part))


def with_keywords(*configs: Any) -> Callable[[Function], Function]:
    """Let `help` and notebooks see which keywords `**options` stands for, as type checkers do.

    Each is a class of options, or a value of one where a function has other defaults than the class.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        named = {p.name: p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD}
        for config in configs:
            for field in fields(config):
                parameter = inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, annotation=field.type)
                default = field.default if isinstance(config, type) else getattr(config, field.name)
                named.setdefault(field.name, parameter.replace(default=default))
        function.__signature__ = signature.replace(parameters=list(named.values()))  # type: ignore[attr-defined]
        return function

    return decorate


def expect(config: Any, name: str, fits: bool, what: str) -> None:
    """Raise `PmvitError` if the value of a field does not fit."""
    if not fits:
        raise PmvitError(f"{name}: expected {what}, got {getattr(config, name)!r}")


def check_choices(config: Any) -> None:
    """Raise `PmvitError` if a field has another value than its `Literal` allows."""
    for field in fields(config):
        known, value = choices(field.type), getattr(config, field.name)
        if known and value not in known and not (value is None and field.default is None):
            raise PmvitError(f"{field.name}: expected one of {', '.join(known)}; got {value!r}")
