"""Base class of user options."""

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from patrickstar.errors import ConfigError


class Options(BaseModel):
    """Frozen, validated keyword options. Raises ConfigError with a one-line message for a wrong one."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    def __init__(self, **options: Any) -> None:
        known = list(type(self).model_fields)
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
                advice = f"did you mean {close[0]!r}? Its options: {', '.join(known)}" if close else "it takes none"
                raise ConfigError(f"{type(self).__name__} has no option {name!r}; {advice}")
        try:
            super().__init__(**options)
        except ValidationError as error:
            problems = "; ".join(
                ": ".join(filter(None, [".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")]))
                for e in error.errors()
            )
            raise ConfigError(f"{type(self).__name__}: {problems}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"{type(self).__name__} can't be changed: create a new one with {name}={value!r}, or a changed copy with "
            f"model_copy(update={{{name!r}: {value!r}}})"
        )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield the options that were given, for `repr`."""
        for name, value in super().__repr_args__():
            if name in self.model_fields_set:
                yield name, value

    def __str__(self) -> str:
        return repr(self)
